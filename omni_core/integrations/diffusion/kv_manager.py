# SPDX-License-Identifier: Apache-2.0
"""All rows of a public request or none, over exactly one of vLLM's `KVCacheManager`.

vLLM's manager knows sequences; here each CFG row is one. What it leaves to its caller and this module does:
one boundary for all rows, pages that are promised to one row kept from another's allocation, the difference between
"busy" and "never", publishing the prefix alone, and generations. Driven by hand against vLLM 0.32; its lookup returns
(blocks, tokens, boundary) and records no statistics by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheManager

from omni_core.diffusion_kv.errors import DiffusionKVError, RequestRefusedError
from omni_core.diffusion_kv.reservations import KVReservationStats, PageState, RowDemand
from omni_core.diffusion_kv.snapshot import KVSnapshot, RowSnapshot
from omni_core.integrations.diffusion.block_hashing import hash_prefix_blocks
from omni_core.integrations.diffusion.eviction_counter import EvictionCounter
from omni_core.integrations.diffusion.hit_boundary import before_image, features_of
from omni_core.integrations.diffusion.row_checks import RowLimits
from omni_core.integrations.diffusion.row_request import RowRequest
from omni_core.integrations.diffusion.sizing import KVPool, register_kv_cache_specs


@dataclass(frozen=True, slots=True)
class _HashedRows:
    """The rows of a request that may have to ask again: hashed once, however often it asks."""

    request_id: str
    demands: tuple[RowDemand, ...]
    rows: tuple[RowRequest, ...]


@dataclass(frozen=True, slots=True)
class _Hit:
    """What every row of a request finds."""

    tokens: int
    blocks: tuple[Any, ...]
    """Per row, vLLM's `KVCacheBlocks` cut at `tokens`."""
    boundaries: tuple[int, ...]
    """Per row, vLLM's `shared_prefix_boundary`."""
    unique_pages: tuple[Any, ...]
    """vLLM's `KVCacheBlock`s of all rows, each once."""


@dataclass(slots=True)
class _LiveRequest:
    """A request that holds pages."""

    rows: tuple[RowRequest, ...]
    snapshot: KVSnapshot
    published: bool = False


class VllmKVReservations:
    """`KVReservations` over vLLM. The engine's one thread calls; nothing blocks."""

    def __init__(
        self, pool: KVPool, *, max_rows: int, enable_prefix_caching: bool, span_safe_hits: bool = False
    ) -> None:
        """An empty pool.

        Args:
            pool: how many pages, of what.
            max_rows: `diffusion_kv_max_rows_per_request`.
            enable_prefix_caching: off, no identity is hashed, nothing hits and nothing is published.
            span_safe_hits: cut hits so that none ends inside an image.
        """
        register_kv_cache_specs()
        self._block_size = pool.block_size
        self._limits = RowLimits(max_rows, pool.max_model_len)
        self._enable_prefix_caching = enable_prefix_caching
        self._span_safe_hits = span_safe_hits
        self._evictions = EvictionCounter()
        self._manager = KVCacheManager(
            pool.kv_cache_config,
            max_model_len=pool.max_model_len,
            scheduler_block_size=pool.block_size,
            hash_block_size=pool.block_size,
            enable_caching=enable_prefix_caching,
            log_stats=True,
            metrics_collector=self._evictions,
        )
        self._usable_pages = pool.num_blocks - 1
        self._live: dict[str, _LiveRequest] = {}
        self._hashed: _HashedRows | None = None
        self._generation = 0
        self._requests = 0
        self._published_requests = 0

    def reserve(
        self, request_id: str, rows: Sequence[RowDemand], *, only_at_hit_tokens: int | None = None
    ) -> KVSnapshot | None:
        self._limits.check(request_id, rows)
        if request_id in self._live:
            generation = self._live[request_id].snapshot.generation
            raise RequestRefusedError(
                request_id, f"it holds pages already, in generation {generation}; free them first"
            )
        native_rows = self._hashed_rows(request_id, tuple(rows))
        hit = self._look_up(native_rows, rows)
        if only_at_hit_tokens is not None and hit.tokens != only_at_hit_tokens:
            return None
        new_pages = self._new_pages(native_rows, hit)
        self._check_fits_empty_pool(request_id, new_pages, hit)
        if not self._fits_now(new_pages, hit) or not self._allocate(native_rows, hit):
            return None
        return self._remember(request_id, rows, native_rows, hit)

    def snapshot(self, request_id: str) -> KVSnapshot | None:
        """The reservation a live request holds, for one that was preempted and goes on; `None` if it holds none."""
        live = self._live.get(request_id)
        return None if live is None else live.snapshot

    def publish(self, request_id: str, generation: int) -> None:
        live = self._live.get(request_id)
        if live is None or live.snapshot.generation != generation:
            holds = "holds no pages" if live is None else f"is in generation {live.snapshot.generation}"
            raise DiffusionKVError(f"publish: request {request_id!r} of generation {generation} {holds}")
        if live.published:
            return
        for row in live.rows:
            # vLLM reads one hash per block it is told to publish, and fails where there is none.
            full_blocks = min(row.num_prompt_tokens // self._block_size, len(row.block_hashes))
            if full_blocks:
                self._manager.cache_blocks(row, full_blocks * self._block_size)
        self._forget_twins(live.rows)
        live.published = True
        if any(row.block_hashes for row in live.rows):
            self._published_requests += 1

    def free(self, request_id: str, generation: int) -> None:
        live = self._live.get(request_id)
        if live is None or live.snapshot.generation != generation:
            return
        del self._live[request_id]
        self._release(live.rows)

    def reset(self) -> bool:
        return bool(self._manager.reset_prefix_cache())  # it refuses while any page is held

    def stats(self) -> KVReservationStats:
        native = self._manager.prefix_cache_stats
        return KVReservationStats(
            requests=self._requests,
            queried_tokens=native.queries,
            hit_tokens=native.hits,
            published_requests=self._published_requests,
            evicted_pages=self._evictions.evicted_pages,
            free_pages=self._manager.block_pool.get_num_free_blocks(),
            total_pages=self._usable_pages,
        )

    def page_states(self) -> tuple[PageState, ...]:
        """Every page a request may use, as it is now. For tests and diagnosis: it looks at each page of the pool."""
        return tuple(
            PageState(page.block_id, page.ref_cnt, page.block_hash is not None)
            for page in self._manager.block_pool.blocks
            if not page.is_null
        )

    def _hashed_rows(self, request_id: str, demands: tuple[RowDemand, ...]) -> tuple[RowRequest, ...]:
        """The rows as vLLM takes them. First come, first served: only one request at a time asks again and again."""
        hashed = self._hashed
        if hashed is not None and hashed.request_id == request_id and hashed.demands == demands:
            return hashed.rows
        rows = tuple(RowRequest(request_id, index, demand) for index, demand in enumerate(demands))
        if self._enable_prefix_caching:
            for row, demand in zip(rows, demands, strict=True):
                if demand.identity is not None:
                    hash_prefix_blocks(row, demand.identity, self._block_size)
        self._hashed = _HashedRows(request_id, demands, rows)
        return rows

    def _look_up(self, rows: Sequence[RowRequest], demands: Sequence[RowDemand]) -> _Hit:
        """Look up all rows before any of them takes a page."""
        found = [self._manager.get_computed_blocks(row) for row in rows]
        tokens = min(found_tokens for _, found_tokens, _ in found)
        if self._span_safe_hits:
            tokens = before_image(tokens, features_of(demands), self._block_size)
        if tokens % self._block_size:
            raise DiffusionKVError(
                f"rows {[row.request_id for row in rows]} hit {tokens} tokens, no whole pages of {self._block_size}; "
                "an internal error"
            )
        blocks = tuple(self._manager.truncate_computed_blocks(found_blocks, tokens) for found_blocks, _, _ in found)
        pages = {page.block_id: page for of_row in blocks for of_group in of_row.blocks for page in of_group}
        return _Hit(tokens, blocks, tuple(boundary for _, _, boundary in found), tuple(pages.values()))

    def _new_pages(self, rows: Sequence[RowRequest], hit: _Hit) -> int:
        return sum(-(-row.num_tokens // self._block_size) - hit.tokens // self._block_size for row in rows)

    def _check_fits_empty_pool(self, request_id: str, new_pages: int, hit: _Hit) -> None:
        """To vLLM "busy" and "never" are one answer; "never" would block the head of the queue for good."""
        needed = new_pages + len(hit.unique_pages)
        if needed > self._usable_pages:
            raise RequestRefusedError(
                request_id,
                f"it needs {needed} pages of {self._block_size} tokens, and the whole pool has {self._usable_pages}; "
                "raise kv_cache_memory_bytes, or send a smaller request",
            )

    def _fits_now(self, new_pages: int, hit: _Hit) -> bool:
        """Whether all rows fit beside those who hold pages. Asked first: a row that fails late has evicted already."""
        pool = self._manager.block_pool
        free_but_promised = sum(page.ref_cnt == 0 for page in hit.unique_pages)
        return bool(new_pages + free_but_promised <= pool.get_num_free_blocks())

    def _allocate(self, rows: Sequence[RowRequest], hit: _Hit) -> bool:
        """Pages for every row, or for none and `False`."""
        pool = self._manager.block_pool
        # A page that was hit may stand in the free queue, where the first row's allocation would take the second's.
        pool.touch(hit.unique_pages)
        complete = False
        try:
            for row, blocks, boundary in zip(rows, hit.blocks, hit.boundaries, strict=True):
                row.shared_prefix_boundary = boundary
                allocated = self._manager.allocate_slots(
                    row,
                    row.num_tokens - hit.tokens,
                    num_new_computed_tokens=hit.tokens,
                    new_computed_blocks=blocks,
                    delay_cache_blocks=True,
                    full_sequence_must_fit=True,
                )
                if allocated is None:
                    return False
            complete = True
        finally:
            if not complete:
                self._release(rows)
            pool.free_blocks(reversed(hit.unique_pages))
        return True

    def _remember(
        self, request_id: str, demands: Sequence[RowDemand], rows: tuple[RowRequest, ...], hit: _Hit
    ) -> KVSnapshot:
        self._hashed = None
        self._generation += 1
        self._requests += 1
        for row in rows:
            row.num_computed_tokens = hit.tokens
            self._manager.record_prefix_cache_stats(row, hit.tokens)
        snapshot = KVSnapshot(
            request_id,
            self._generation,
            tuple(
                RowSnapshot(index, demand.geometry, hit.tokens, self._page_ids(row))
                for index, (row, demand) in enumerate(zip(rows, demands, strict=True))
            ),
        )
        self._live[request_id] = _LiveRequest(rows, snapshot)
        return snapshot

    def _page_ids(self, row: RowRequest) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(group) for group in self._manager.get_block_ids(row.request_id))

    def _forget_twins(self, rows: Sequence[RowRequest]) -> None:
        """Of pages that two rows of one cold request computed alike, keep one findable.

        Only pages of this request are forgotten, before anyone could hit them; they stay its own until it ends and
        are then the first to be used again.
        """
        first_page: dict[Any, int] = {}
        twins: set[int] = set()
        for row in rows:
            (page_ids,) = self._page_ids(row)
            for block_hash, page_id in zip(row.block_hashes, page_ids, strict=False):
                if first_page.setdefault(block_hash, page_id) != page_id:
                    twins.add(page_id)
        self._manager.evict_blocks(twins)

    def _release(self, rows: Sequence[RowRequest]) -> None:
        """Last row first, so that what the rows share is evicted last. Harmless for a row that holds nothing."""
        for row in reversed(rows):
            self._manager.free(row)
            row.forget_progress()
