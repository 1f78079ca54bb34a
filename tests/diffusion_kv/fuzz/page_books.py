# SPDX-License-Identifier: Apache-2.0
"""What a test knows of every page, kept beside the real books and compared with them.

`WatchedReservations` stands between the scheduler and whoever hands out pages. It knows, from the requests' content and
not from any hash, what each may hit, and fills every page that nobody may read with NaN.
"""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from diffusion_kv.fuzz.small_model import truth_of

from omni_core.diffusion_kv.attention.owner import RowKey
from omni_core.diffusion_kv.errors import DiffusionKVError, RequestRefusedError

TOLERANCE = 1e-9
"""Of keys and values in float64: a hit changes the shapes of the model's products, and with them the last bits."""


@dataclass(slots=True, eq=False)
class Holder:
    """A request that holds pages."""

    snapshot: object
    prepared: object
    epoch: int
    weight_seed: int
    published: bool = False


@dataclass(frozen=True, slots=True)
class Claim:
    """What a published page is found by, and what it must hold."""

    key: object
    values: torch.Tensor
    """`[layers, 2, block_size, num_kv_heads, head_size]`."""


def prefix_key(prepared, row_index, end, epoch):
    """Everything that the keys and values of a row's tokens `[0, end)` depend on, each value itself, nothing hashed."""
    request, row = prepared.request, prepared.rows[row_index]
    prefix_tokens = row.layout.geometry.prefix_tokens
    starts = [span.start for span in row.layout.spans if span.start < prefix_tokens]
    drawn_from = prepared if request.seed is None else request.seed
    pictures = tuple(
        (start, pixels.tobytes(), drawn_from)
        for start, pixels in zip(starts, request.references, strict=True)
        if start < end
    )
    return epoch, request.lora, row.token_ids[:end], pictures


@dataclass
class WatchedReservations:
    """A `KVReservations` that says what the one behind it must answer, and checks that it does."""

    inner: object
    worker: object
    model: object
    span_safe: bool
    worker_first: bool = True
    """Whether the worker must have dropped a request before its pages are given back."""
    holders: dict = field(default_factory=dict)
    claims: dict = field(default_factory=dict)
    """Page id -> `Claim`, of every published page."""
    ended: list = field(default_factory=list)
    """(request id, generation) of reservations that were given back."""
    never_fit: set = field(default_factory=set)
    epoch: int = 0
    generation: int = 0
    hits: int = 0

    @property
    def block_size(self):
        return self.worker.pool.block_size

    def states(self):
        return {state.page_id: state for state in self.inner.page_states()}

    # -- what the scheduler calls

    def reserve(self, request_id, rows, *, only_at_hit_tokens=None):
        prepared, before = self.model.prepared[request_id], self.states()
        assert [row.geometry for row in rows] == [row.layout.geometry for row in prepared.rows]
        hit, keys = self._expected_hit(prepared)
        new_pages = sum(-(-row.geometry.total_tokens // self.block_size) for row in rows)
        new_pages -= len(rows) * hit // self.block_size
        try:
            snapshot = self.inner.reserve(request_id, rows, only_at_hit_tokens=only_at_hit_tokens)
        except RequestRefusedError:
            assert request_id in self.holders or new_pages + len(keys) > len(before)
            assert self.states() == before
            self.never_fit.add(request_id)
            raise
        assert new_pages + len(keys) <= len(before), "a request that never fits was let in, or waits for ever"
        free = sum(state.num_rows == 0 for state in before.values())
        if snapshot is None:
            hit_when_idle = sum(any(before[page].num_rows == 0 for page in self._pages_of(key)) for key in keys)
            another_hit = only_at_hit_tokens not in (None, hit)
            assert another_hit or new_pages + hit_when_idle > free, f"{request_id} waits, and there are pages for it"
            assert self.states() == before, "a request that waits took or evicted something"
            return None
        assert only_at_hit_tokens in (None, hit)
        self._check_new(snapshot, prepared, hit, before)
        return snapshot

    def publish(self, request_id, generation):
        holder, before = self.holders.get(request_id), self.states()
        self.inner.publish(request_id, generation)
        assert holder is not None
        assert holder.snapshot.generation == generation
        if holder.published:
            assert self.states() == before
            return
        holder.published = True
        for row in holder.snapshot.rows:
            installed = self.worker.row(RowKey(request_id, row.row_index))
            assert installed is not None
            assert installed.first_step_done, "published before its keys and values were computed"
            assert self.model.first_queries[request_id] == row.cached_prefix_tokens, "its first step began elsewhere"
        self._claim(holder)

    def free(self, request_id, generation):
        holder, before = self.holders.get(request_id), self.states()
        if holder is None or holder.snapshot.generation != generation:
            self.inner.free(request_id, generation)
            assert self.states() == before, "pages were given back that are another reservation's, or nobody's"
            return
        if self.worker_first and not self.worker.closed:
            assert self.worker.generation(request_id) != generation, "free, and still the worker's"
        self.inner.free(request_id, generation)
        del self.holders[request_id]
        self.ended.append((request_id, generation))
        self.fill_with_nan(self._pages(holder.snapshot))

    def reset(self):
        done = self.inner.reset()
        assert done == (not self.holders)
        if done:
            emptied, self.claims = set(self.claims), {}
            self.fill_with_nan(emptied)
        return done

    def stats(self):
        return self.inner.stats()

    # -- what must be so at any time

    def check(self):
        states = self.states()
        free = {page for page, state in states.items() if state.num_rows == 0}
        stats = self.inner.stats()
        assert 0 not in states, "the null page is counted as usable"
        assert stats.free_pages == len(free), "a page stands twice in the free queue, or is missing there"
        assert stats.total_pages == len(states)
        num_rows = dict.fromkeys(states, 0)
        writers = {}
        for holder in self.holders.values():
            for row in holder.snapshot.rows:
                cached = row.cached_prefix_tokens // self.block_size
                for place, page in enumerate(row.block_ids[0]):
                    num_rows[page] += 1
                    if place >= cached:
                        assert writers.setdefault(page, row) is row, f"page {page} is written by two rows"
        assert {page: state.num_rows for page, state in states.items()} == num_rows, "holders"
        shared = {page for page, count in num_rows.items() if count > 1}
        assert shared <= set(self.claims), "two rows share a page that was never published"
        assert {page for page, state in states.items() if state.published} == set(self.claims), "published pages"
        if not self.worker.closed:
            self._check_contents(free)

    def _check_contents(self, free):
        layers = torch.stack(self.worker.pool.layers)
        if self.claims:
            kept = layers[:, list(self.claims)]  # layers, pages, heads, keys then values, head size
            kept = kept.unflatten(3, (2, self.block_size)).permute(1, 0, 3, 4, 2, 5)
            wanted = torch.stack([claim.values for claim in self.claims.values()])
            wrong = ~((kept - wanted).abs() <= TOLERANCE).flatten(1).all(1)
            wrong_pages = [page for page, is_wrong in zip(self.claims, wrong.tolist(), strict=True) if is_wrong]
            assert not wrong_pages, f"published pages {wrong_pages} do not hold what they are found by"
        dead = sorted(free - set(self.claims))
        assert bool(layers[:, dead].isnan().all()), "someone wrote to a page that nobody holds"

    def check_tables(self, also_held=()):
        """The worker's tables hold the live reservations, and those of `also_held` whose removal is under way."""
        live = [holder.snapshot for holder in self.holders.values()]
        held = [one for one in live if self.worker.generation(one.request_id) == one.generation]
        held += also_held
        assert {snapshot.request_id for snapshot in held} == set(self.worker.request_ids)
        host = self.worker.tables.host
        wanted = np.zeros_like(host)
        readers = np.zeros_like(self.worker.cached_readers)
        taken = set()
        for snapshot in held:
            assert self.worker.generation(snapshot.request_id) == snapshot.generation
            for row in snapshot.rows:
                table_row = self.worker.row(RowKey(snapshot.request_id, row.row_index)).table_row
                assert table_row not in taken, "two rows share a row of the block tables"
                taken.add(table_row)
                wanted[table_row, : len(row.block_ids[0])] = row.block_ids[0]
                readers[list(row.block_ids[0][: row.cached_prefix_tokens // self.block_size])] += 1
        assert (host == wanted).all(), "block tables"
        assert (self.worker.tables.device.numpy() == wanted).all(), "block tables on the device"
        assert (self.worker.cached_readers == readers).all(), "readers of hit pages"
        assert self.worker.tables.num_free_rows == self.worker.tables.num_rows - len(taken)

    def check_late_messages(self, request_id, generation):
        """Messages about a reservation that was given back: nothing happens."""
        before, held = self.states(), self.worker.request_ids
        self.free(request_id, generation)
        with pytest.raises(DiffusionKVError, match="publish"):
            self.inner.publish(request_id, generation)
        if self.worker.generation(request_id) != generation:
            self.worker.remove(request_id, generation)
            assert self.worker.request_ids == held
        assert self.states() == before

    # -- how the books are kept

    def fill_with_nan(self, pages):
        """Those of `pages` that nobody may read any more."""
        if self.worker.closed:
            return
        states = self.states()
        dead = [page for page in pages if states[page].num_rows == 0 and page not in self.claims]
        for layer in self.worker.pool.layers:
            layer[dead] = torch.nan

    def _pages(self, snapshot):
        return {page for row in snapshot.rows for page in row.block_ids[0]}

    def _pages_of(self, key):
        return [page for page, claim in self.claims.items() if claim.key == key]

    def _block_keys(self, prepared, row_index):
        prefix_tokens = prepared.rows[row_index].layout.geometry.prefix_tokens
        for end in range(self.block_size, prefix_tokens + 1, self.block_size):
            yield prefix_key(prepared, row_index, end, self.epoch)

    def _expected_hit(self, prepared):
        """The hit in tokens, and the keys of its blocks, those that rows share once."""
        findable = {claim.key for claim in self.claims.values()}
        of_rows = [list(self._block_keys(prepared, index)) for index in range(len(prepared.rows))]
        counts = []
        for keys in of_rows:
            missing = [index for index, key in enumerate(keys) if key not in findable]
            counts.append(missing[0] if missing else len(keys))
        hit = min(counts) * self.block_size
        while self.span_safe and self._inside_picture(prepared, hit):
            hit -= self.block_size
        return hit, {key for keys in of_rows for key in keys[: hit // self.block_size]}

    def _inside_picture(self, prepared, hit):
        return any(span.start < hit < span.end for span in prepared.rows[0].layout.spans)

    def _check_new(self, snapshot, prepared, hit, before):
        assert snapshot.generation > self.generation, "generations grow"
        self.generation = snapshot.generation
        assert [row.row_index for row in snapshot.rows] == list(range(len(prepared.rows)))
        cached, fresh = hit // self.block_size, []
        for index, row in enumerate(snapshot.rows):
            assert row.geometry == prepared.rows[index].layout.geometry
            assert row.cached_prefix_tokens == hit, "the hit of all rows is the shortest of them, in whole pages"
            (pages,) = row.block_ids
            assert len(pages) == -(-row.geometry.total_tokens // self.block_size)
            keys = list(self._block_keys(prepared, index))[:cached]
            assert [self.claims[page].key for page in pages[:cached]] == keys, "a hit page holds another prefix"
            fresh += pages[cached:]
        assert 0 not in fresh
        assert len(set(fresh)) == len(fresh), "one page for two places"
        assert all(before[page].num_rows == 0 for page in fresh), "a page of another live row was handed out"
        assert set(fresh).isdisjoint(page for row in snapshot.rows for page in row.block_ids[0][:cached])
        for page in fresh:
            self.claims.pop(page, None)
        for layer in self.worker.pool.layers:
            layer[fresh] = torch.nan
        self.hits += bool(hit)
        self.holders[snapshot.request_id] = Holder(snapshot, prepared, self.epoch, self.model.weight_seed)

    def _claim(self, holder):
        truth = truth_of(holder.prepared, self.model.layout, holder.weight_seed)
        first_page = {}
        for row in holder.snapshot.rows:
            for place, key in enumerate(self._block_keys(holder.prepared, row.row_index)):
                page = row.block_ids[0][place]
                # Of blocks that two rows of one request computed alike, the first one's is found.
                if first_page.setdefault(key, page) == page and page not in self.claims:
                    start = place * self.block_size
                    values = truth.prefixes[row.row_index][:, :, start : start + self.block_size]
                    self.claims[page] = Claim(key, values)
