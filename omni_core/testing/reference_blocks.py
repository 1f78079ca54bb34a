# SPDX-License-Identifier: Apache-2.0
"""The reference cache's KV blocks and requests: what lies where, to whom it may be shown, and what events change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from omni_core.prefix_cache.config import PrefixCacheConfig
from omni_core.prefix_cache.events import BlockCopy, RequestEvent, RequestEventKind, StepEvents
from omni_core.testing.reference_request import LiveRequest, Rows

_ENDS = (RequestEventKind.FINISHED, RequestEventKind.ABORTED)
_ENTRIES = (RequestEventKind.STARTED, RequestEventKind.RESUMED, RequestEventKind.REPLACED)


class ReferenceBlocks:
    """Rows by slot, digests and owners by block, live requests by id."""

    def __init__(self, config: PrefixCacheConfig) -> None:
        self.config = config
        self.live: dict[str, LiveRequest] = {}
        self.ended: list[LiveRequest] = []
        self._num_lives = 0
        self._pool: dict[int, Rows] = {}
        self._digests: dict[int, int] = {}
        self._private_to: dict[int, int] = {}
        self._adapters: dict[int, int] = {}
        self._under_way = False
        self._new_weights: list[int | None] = []

    def take_events(self, events: StepEvents) -> None:
        """Apply one step's news: ends, copies, tenancies, digests, and only then what entering requests may read."""
        self.step_is_over()
        self._under_way = True
        for event in events.requests:
            if event.kind in _ENDS and event.req_id in self.live:
                self.end(self.live[event.req_id])
        entering = [event for event in events.requests if event.kind in _ENTRIES]
        for copy in events.block_copies:
            self.copy_block(copy, entering)
        copied_onto = {copy.destination_block_id for copy in events.block_copies}
        for event in events.requests:
            if event.kind not in _ENDS:
                self._take_blocks(event, copied_onto)
        self._digests.update((filled.block_id, filled.digest) for filled in events.filled_blocks)
        for event in entering:
            if event.kind is RequestEventKind.REPLACED:
                self.replace(event)
        for event in events.requests:
            if event.kind is RequestEventKind.EXTENDED:
                self.live[event.req_id].block_ids.extend(event.block_ids)
                self._fill(event.block_ids, self.live[event.req_id].adapter_id)
        for event in entering:
            own = event.block_ids[event.num_computed_tokens // self.config.block_size :]
            live = self.live.get(event.req_id)
            self._fill(own, event.adapter_id if live is None else live.adapter_id)
        for event in entering:
            self.enter(event)

    def step_is_over(self) -> None:
        """The step under way was saved, or never will be: what became old meanwhile is gone now."""
        self._under_way = False
        for adapter_id in self._new_weights:
            self.forget_old(adapter_id)
        self._new_weights = []

    def bump_weight_version(self) -> None:
        """The weights have changed."""
        self._change(None)

    def bump_adapter_version(self, adapter_id: int) -> None:
        """An adapter has changed."""
        self._change(adapter_id)

    def _change(self, adapter_id: int | None) -> None:
        if self._under_way:
            self._new_weights.append(adapter_id)
        else:
            self.forget_old(adapter_id)

    def forget_old(self, adapter_id: int | None) -> None:
        """Forget the rows of an adapter's blocks, or all (`None`); who holds which block stays."""
        for block_id in {slot // self.config.block_size for slot in self._pool}:
            if adapter_id in (None, self._adapters.get(block_id, 0)):
                self.forget_rows(block_id, 0)

    def begin_tenancy(self, block_ids: Iterable[int]) -> None:
        """Forget the rows of blocks that change hands."""
        for block_id in block_ids:
            self._digests.pop(block_id, None)
            self._private_to.pop(block_id, None)
            self._adapters.pop(block_id, None)
            self.forget_rows(block_id, 0)

    def forget_rows(self, block_id: int, first_offset: int) -> None:
        """Forget a block's rows from an offset on."""
        for offset in range(first_offset, self.config.block_size):
            self._pool.pop(block_id * self.config.block_size + offset, None)

    def write(self, slot: int, rows: Rows) -> None:
        """Store one token's rows; rows of other keys there stay as they are."""
        self._pool.setdefault(slot, {}).update(rows)

    def row_of(self, request: LiveRequest, position: int) -> Rows:
        """The rows stored for a position of a request, as far as it may see them."""
        index, offset = divmod(position, self.config.block_size)
        if index in request.withheld:
            return {}
        return dict(self._pool.get(request.block_ids[index] * self.config.block_size + offset, {}))

    def end(self, request: LiveRequest) -> None:
        """A request is over."""
        request.ended = True
        self.ended.append(request)
        del self.live[request.req_id]

    def replace(self, event: RequestEvent) -> None:
        """A request's content is replaced: the block it keeps in part is nobody else's from now on."""
        old = self.live.pop(event.req_id, None)
        life = self._next_life() if old is None else old.life
        if old is not None:
            old.replaced = True
        adapter_id = event.adapter_id if old is None else old.adapter_id
        self.live[event.req_id] = LiveRequest(event.req_id, life, adapter_id)
        full, kept = divmod(event.num_computed_tokens, self.config.block_size)
        if kept:
            self._private_to[event.block_ids[full]] = life

    def enter(self, event: RequestEvent) -> None:
        """A request starts, comes back, or begins a new version, with a table of its own."""
        request = self.live.get(event.req_id)
        if request is None:
            request = self.live[event.req_id] = LiveRequest(event.req_id, self._next_life(), event.adapter_id)
        if request.has_drafts:
            request.reject_from(event.num_known_tokens - 1)
            request.has_drafts = False
        request.block_ids = list(event.block_ids)
        request.computed_upto = event.num_computed_tokens
        request.withheld = self.withheld(request, event)

    def withheld(self, request: LiveRequest, event: RequestEvent) -> set[int]:
        """Blocks of a hit whose rows may be of another content."""
        hit_blocks = -(-event.num_computed_tokens // self.config.block_size)
        withheld = set()
        for index, block_id in enumerate(event.block_ids[:hit_blocks]):
            wanted = event.block_digests[index] if event.block_digests else 0
            held = self._digests.get(block_id, 0)
            private = self._private_to.get(block_id, request.life) != request.life
            another = wanted != held
            if self._adapters.get(block_id, 0) != request.adapter_id:
                withheld.add(index)
            if (another and wanted) or (private and (another or not wanted)):
                withheld.add(index)
        return withheld

    def settle_drafts(self, request: LiveRequest, run_start: int) -> None:
        """A run that starts below the last one's end says that the rows in between were of rejected drafts."""
        if run_start < request.computed_upto:
            request.reject_from(run_start)
            for position in range(run_start, request.computed_upto):
                index, offset = divmod(position, self.config.block_size)
                self._pool.pop(request.block_ids[index] * self.config.block_size + offset, None)

    def copy_block(self, copy: BlockCopy, entering: Sequence[RequestEvent]) -> None:
        """Copy the rows of a block that its new owner's hit covers; of a private block, none."""
        valid = self.config.block_size
        for event in entering:
            at = event.num_computed_tokens // self.config.block_size
            if event.block_ids[at : at + 1] == (copy.destination_block_id,):
                valid = event.num_computed_tokens % self.config.block_size
        self.begin_tenancy([copy.destination_block_id])
        if copy.source_block_id in self._adapters:
            self._adapters[copy.destination_block_id] = self._adapters[copy.source_block_id]
        if copy.source_block_id in self._private_to:
            return
        for offset in range(valid):
            source = self._pool.get(copy.source_block_id * self.config.block_size + offset)
            if source is not None:
                self._pool[copy.destination_block_id * self.config.block_size + offset] = dict(source)

    def _fill(self, block_ids: Iterable[int], adapter_id: int) -> None:
        """An adapter computes these blocks' rows from now on."""
        self._adapters.update(dict.fromkeys(block_ids, adapter_id))

    def _take_blocks(self, event: RequestEvent, copied_onto: set[int]) -> None:
        """New tenancies outside the hit; what lay behind the hit in its last block is of another content."""
        full, kept = divmod(event.num_computed_tokens, self.config.block_size)
        if event.kind is RequestEventKind.EXTENDED:
            full, kept = 0, 0
        self.begin_tenancy(block for block in event.block_ids[full + bool(kept) :] if block not in copied_onto)
        if kept:
            self.forget_rows(event.block_ids[full], kept)
        self._digests.update(zip(event.block_ids[full:], event.block_digests[full:], strict=False))

    def _next_life(self) -> int:
        self._num_lives += 1
        return self._num_lives
