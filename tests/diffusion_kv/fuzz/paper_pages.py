# SPDX-License-Identifier: Apache-2.0
"""Pages without vLLM: a `KVReservations` in the plainest way, so that the rest can be fuzzed where vLLM is not."""

from collections import Counter

from omni_core.diffusion_kv.errors import DiffusionKVError, RequestRefusedError
from omni_core.diffusion_kv.reservations import KVReservationStats, PageState
from omni_core.diffusion_kv.snapshot import KVSnapshot, RowSnapshot


class PaperPages:
    """Published pages are found by what stands before and in them; the page that was free longest is used first."""

    def __init__(self, usable_pages, block_size):
        self._block_size = block_size
        self._total = usable_pages
        self._free = list(range(1, usable_pages + 1))
        self._num_rows = Counter()
        self._keys = {}
        self._live = {}
        self._generation = 0

    def reserve(self, request_id, rows, *, only_at_hit_tokens=None):
        if request_id in self._live:
            raise RequestRefusedError(request_id, "it holds pages already")
        pages_by_key = {key: page for page, key in self._keys.items()}
        hits = []
        for row in rows:
            found = [pages_by_key.get(key) for key in self._row_keys(row)]
            hits.append(found[: found.index(None)] if None in found else found)
        cached = min(map(len, hits))
        if only_at_hit_tokens not in (None, cached * self._block_size):
            return None
        hits = [found[:cached] for found in hits]
        hit_pages = {page for found in hits for page in found}
        new_pages = [-(-row.geometry.total_tokens // self._block_size) - cached for row in rows]
        if sum(new_pages) + len(hit_pages) > self._total:
            raise RequestRefusedError(request_id, "it is larger than the pool")
        free = [page for page in self._free if page not in hit_pages]
        if sum(new_pages) > len(free):
            return None
        snapshots = []
        for index, (row, found, count) in enumerate(zip(rows, hits, new_pages, strict=True)):
            fresh, free = free[:count], free[count:]
            for page in fresh:
                self._keys.pop(page, None)
            self._num_rows.update([*found, *fresh])
            pages = ((*found, *fresh),)
            snapshots.append(RowSnapshot(index, row.geometry, cached * self._block_size, pages))
        self._free = free
        self._generation += 1
        snapshot = KVSnapshot(request_id, self._generation, tuple(snapshots))
        self._live[request_id] = (snapshot, tuple(rows))
        return snapshot

    def publish(self, request_id, generation):
        snapshot, rows = self._live.get(request_id, (None, ()))
        if snapshot is None or snapshot.generation != generation:
            raise DiffusionKVError(f"publish: {request_id} of generation {generation} is not live")
        first_page = {}
        for row, demand in zip(snapshot.rows, rows, strict=True):
            for page, key in zip(row.block_ids[0], self._row_keys(demand), strict=False):
                if first_page.setdefault(key, page) == page:
                    self._keys[page] = key

    def free(self, request_id, generation):
        snapshot, _ = self._live.get(request_id, (None, ()))
        if snapshot is None or snapshot.generation != generation:
            return
        del self._live[request_id]
        for row in reversed(snapshot.rows):
            for page in reversed(row.block_ids[0]):
                self._num_rows[page] -= 1
                if not self._num_rows[page]:
                    self._free.append(page)

    def reset(self):
        if not self._live:
            self._keys.clear()
        return not self._live

    def stats(self):
        return KVReservationStats(self._generation, 0, 0, 0, 0, len(self._free), self._total)

    def page_states(self):
        pages = range(1, self._total + 1)
        return tuple(PageState(page, self._num_rows[page], page in self._keys) for page in pages)

    def _row_keys(self, row):
        """Per full prefix block: the namespace, the tokens up to its end, and every image that begins before it."""
        identity = row.identity
        for end in range(self._block_size, row.geometry.prefix_tokens + 1, self._block_size):
            images = tuple(feature for feature in identity.features if feature.start < end)
            yield identity.namespace, identity.token_ids[:end], images
