# SPDX-License-Identifier: Apache-2.0
"""Block tables of the simulated scheduler: prefix hits, growth, copies of partly hit blocks, reservation."""

from __future__ import annotations

import random
from collections.abc import Iterable

from omni_core.prefix_cache.events import BlockCopy
from omni_core.testing.scheduler_config import Preemption, SchedulerConfig
from omni_core.testing.sim_allocator import SimBlockAllocator, salt_hash
from omni_core.testing.sim_live import LiveRequest
from omni_core.testing.sim_request import SimRequest


class SimTables:
    """Gives requests their blocks. Engine thread only."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._size = config.block_size
        self.allocator = SimBlockAllocator(config.num_blocks, config.block_size)
        self._copies: dict[str, BlockCopy] = {}
        self._copy_sources: list[int] = []
        self._published_now: set[int] = set()

    def begin_schedule(self) -> None:
        """Hashes published from now on are of blocks that no earlier step computed."""
        self._published_now.clear()

    def end_step(self) -> None:
        """Sources of block copies need not be held any more."""
        for source in self._copy_sources:
            self.allocator.free([source])
        self._copy_sources.clear()

    def max_blocks(self, request: SimRequest) -> int:
        """Most blocks a request can come to hold."""
        return self.allocator.blocks_for(request.max_rows) + self._side_blocks_for(request.max_rows)

    def can_reserve(self, request: SimRequest, lives: Iterable[LiveRequest], live: LiveRequest) -> bool:
        """Whether a request that holds blocks may come to need those of `request` instead."""
        others = self._reserved(other for other in lives if other is not live)
        held = len(live.block_ids) + len(live.side_block_ids)
        return self.max_blocks(request) - held <= self.allocator.num_free_blocks - others

    def can_grow(self, live: LiveRequest, stop: int) -> bool:
        """Whether enough blocks are free for the positions before `stop`."""
        return self._growth(live, stop) <= self.allocator.num_free_blocks

    def grow(self, live: LiveRequest, stop: int, known_stop: int) -> tuple[list[int], bool]:
        """Give a request the blocks for the positions before `stop`.

        Args:
            live: the request.
            stop: after the last position that will be computed.
            known_stop: after the last of them whose token is known: hashes cover no draft.

        Returns:
            The blocks added, and whether any hash was published.
        """
        added = self.allocator.allocate(max(0, self.allocator.blocks_for(stop) - len(live.block_ids)))
        live.block_ids.extend(added)
        self._slide_side_blocks(live, stop)
        live.hash_blocks(self._size)
        published = False
        for index in range(live.num_published, known_stop // self._size):
            block_id = live.block_ids[index]
            live.num_published = index + 1
            if live.keeps_stale_hashes and self.allocator.is_published(block_id):
                continue
            self.allocator.publish(block_id, live.hashed[index])
            self._published_now.add(block_id)
            published = True
        return added, published

    def admit(self, live: LiveRequest, most_tokens: int, lives: list[LiveRequest]) -> bool:
        """Find a request's prefix hit and take its blocks. `False`: too few blocks are free, and nothing was taken.

        Args:
            live: a request that waits; one that kept its blocks needs no hit.
            most_tokens: the most it may compute in this step.
            lives: every request that has not ended.
        """
        reserves = self._config.preemption is Preemption.NEVER
        if live.block_ids:
            stop = min(live.num_computed + most_tokens, live.num_known)
            return reserves or self.can_grow(live, stop)
        live.hash_blocks(self._size)
        max_hit = live.num_known - 1
        hit = self.allocator.find_prefix(live.hashed, max_hit)
        start = len(hit) * self._size
        available = self.allocator.num_free_blocks - sum(self.allocator.is_free(block) for block in hit)
        if reserves:
            available -= self._reserved(lives)
            needed = self.max_blocks(live.track.request) - len(hit)
        else:
            # A hit inside the next block lets the run start, and end, almost a block further.
            further = self._size if self._config.partial_block_hits else 0
            stop = min(start + most_tokens + further, live.num_known)
            needed = self.allocator.blocks_for(stop) - len(hit) + self._side_blocks_for(stop)
        if needed > available:
            return False
        self.allocator.touch(hit)
        live.block_ids = list(hit)
        live.num_computed, live.num_published = start, len(hit)
        # One spare block, because holding the source may keep a free block from those counted above.
        if self._config.partial_block_hits and needed < available:
            self._hit_inside_next_block(live, max_hit)
        return True

    def take_copies(self, live: LiveRequest) -> list[BlockCopy]:
        """The block copies a request needs before its run."""
        copy = self._copies.pop(live.req_id, None)
        return [] if copy is None else [copy]

    def keep_prefix(self, live: LiveRequest, kept: int, rng: random.Random) -> None:
        """The content of a request that holds blocks was replaced: keep what holds its first `kept` positions.

        A block that another request holds too is not kept in part. Hashes of the old content may stay published for
        blocks that stay in the table, as in vLLM before its streaming sessions learned to drop them.
        """
        full, rest = divmod(kept, self._size)
        if rest and self.allocator.is_shared(live.block_ids[full]):
            kept, rest = full * self._size, 0
        stays = full + bool(rest)
        copies = self._config.partial_block_hits
        if self._config.block_digests and not copies and rng.random() < 0.5:
            # Only a digest can tell the cache that whole blocks changed their content under a hash that stayed; a block
            # copy has none.
            room = min(len(live.block_ids), self.allocator.blocks_for(live.num_known))
            while stays < room and not self.allocator.is_shared(live.block_ids[stays]):
                stays += 1
        self.allocator.free(live.block_ids[stays:])
        del live.block_ids[stays:]
        self.allocator.free(live.side_block_ids)
        live.side_block_ids = []
        if rng.random() < 0.4:
            for block_id in live.block_ids[full:]:
                self.allocator.forget_hash(block_id)
        live.keeps_stale_hashes = rng.random() < 0.5
        live.num_computed, live.num_published = kept, full

    def free(self, live: LiveRequest) -> None:
        """A request loses its blocks."""
        self.allocator.free(live.block_ids)
        self.allocator.free(live.side_block_ids)
        live.block_ids, live.side_block_ids = [], []
        self._copies.pop(live.req_id, None)

    def _hit_inside_next_block(self, live: LiveRequest, max_hit: int) -> None:
        start = live.num_computed
        stop = min(start + self._size, max_hit)
        wanted = live.track.content(start, stop)
        depth = len(live.block_ids)
        parent = live.hashed[depth - 1].block_hash if depth else salt_hash(live.track.request.salt)
        source, shared = self.allocator.find_inside(parent, wanted, self._published_now)
        if source is None:
            return
        self.allocator.touch([source])
        self._copy_sources.append(source)
        (destination,) = self.allocator.allocate(1)
        live.block_ids.append(destination)
        live.num_computed = start + shared
        self._copies[live.req_id] = BlockCopy(source, destination)

    def _reserved(self, lives: Iterable[LiveRequest]) -> int:
        return sum(
            self.max_blocks(live.track.request) - len(live.block_ids) - len(live.side_block_ids)
            for live in lives
            if live.block_ids
        )

    def _growth(self, live: LiveRequest, stop: int) -> int:
        side = max(0, self._side_blocks_for(stop) - len(live.side_block_ids))
        return max(0, self.allocator.blocks_for(stop) - len(live.block_ids)) + side

    def _side_blocks_for(self, stop: int) -> int:
        window = self._config.side_group_window
        return 0 if window is None else self.allocator.blocks_for(min(stop, window))

    def _slide_side_blocks(self, live: LiveRequest, stop: int) -> None:
        """The window has moved on: its oldest block goes back to the pool and may come out as anybody's."""
        wanted = self._side_blocks_for(stop)
        if wanted and len(live.side_block_ids) == wanted:
            self.allocator.free([live.side_block_ids.pop(0)])
        live.side_block_ids.extend(self.allocator.allocate(wanted - len(live.side_block_ids)))
