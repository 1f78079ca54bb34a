# SPDX-License-Identifier: Apache-2.0
"""What the simulated scheduler keeps of a request from its submission to its end, and how it is announced."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from omni_core.prefix_cache.events import BlockCopy, FilledBlock, RequestEvent, RequestEventKind
from omni_core.testing.engine_schedule import ScheduledRun
from omni_core.testing.scheduler_config import Preemption, SchedulerConfig
from omni_core.testing.sim_allocator import HashedBlock, extend_hashed_blocks
from omni_core.testing.sim_request import SimRequest, TokenTrack


class Entry(Enum):
    """Why the next schedule of a request must announce its whole table."""

    FIRST = "first"
    RESUMED = "resumed"
    """It was preempted and has a new table."""
    CONTINUED = "continued"
    """The next piece of its prompt has arrived; it kept its table."""
    REPLACED = "replaced"
    """It has other content than was announced."""


@dataclass(slots=True)
class LiveRequest:
    """One request between `add` and its end."""

    track: TokenTrack
    pieces: deque[tuple[int, ...]]
    """Parts of the prompt that have not arrived."""
    block_ids: list[int] = field(default_factory=list)
    side_block_ids: list[int] = field(default_factory=list)
    """Blocks of the KV group the cache is not told of."""
    num_computed: int = 0
    hashed: list[HashedBlock] = field(default_factory=list)
    num_published: int = 0
    """Blocks of the table whose hash needs no publishing (any more)."""
    entry: Entry | None = Entry.FIRST
    told: bool = False
    """Whether the cache has heard of it."""
    num_digests_told: int = 0
    not_before: int = 0
    """The first schedule that may admit it."""
    keeps_stale_hashes: bool = False
    """Whether blocks that carry a hash of replaced content keep it when they are full again."""

    @classmethod
    def of(cls, request: SimRequest) -> LiveRequest:
        """A request that was just submitted."""
        return cls(TokenTrack(request), deque(request.later_pieces))

    @property
    def req_id(self) -> str:
        """The request's id."""
        return self.track.req_id

    @property
    def num_known(self) -> int:
        """Tokens known: prompt pieces that have arrived, and sampled ones."""
        return len(self.track.token_ids)

    @property
    def waits_for_piece(self) -> bool:
        """Whether all that has arrived is computed, and more of the prompt is to come."""
        return bool(self.pieces) and self.num_computed == self.num_known

    @property
    def decodes(self) -> bool:
        """Whether its whole prompt is computed: only such a request has drafts."""
        return self.num_known > self.track.request.num_prompt_tokens and self.num_computed == self.num_known - 1

    def receive_piece(self) -> None:
        """The next piece of the prompt arrives."""
        self.track.token_ids.extend(self.pieces.popleft())

    def hash_blocks(self, block_size: int) -> None:
        """Hash every block whose tokens are known."""
        extend_hashed_blocks(self.hashed, self.track, block_size)

    def take_content(self, request: SimRequest) -> int:
        """The content is replaced. Returns how many leading positions stay the same."""
        track = TokenTrack(request)
        shared = self.track.shared_prefix(track)
        self.track = track
        self.pieces = deque(request.later_pieces)
        self.hashed = []
        self.entry = Entry.REPLACED
        return min(shared, self.num_computed, self.num_known - 1)

    def lose_blocks(self) -> None:
        """It was preempted: it computes everything again, but for what it hits when it comes back."""
        self.block_ids, self.side_block_ids = [], []
        self.num_computed = self.num_published = 0
        if self.entry in (None, Entry.CONTINUED):
            self.entry = Entry.RESUMED


@dataclass(slots=True)
class Plan:
    """A run as scheduled, before it is sure that it will be announced."""

    live: LiveRequest
    run: ScheduledRun
    added: list[int]
    """Blocks appended to the table in this schedule."""
    published: bool
    """Whether this schedule published a hash for it."""
    copies: list[BlockCopy] = field(default_factory=list)


def announce(plan: Plan, config: SchedulerConfig) -> tuple[RequestEvent | None, list[FilledBlock]]:
    """The event a run needs, if any, and the blocks whose digest has become known since the last one."""
    live, run = plan.live, plan.run
    event, filled = None, []
    if live.entry is not None:
        kind = _kind(live.entry, config.preemption)
        known = 0 if live.entry is Entry.FIRST else live.num_known
        digests = _digests(live, 0) if config.block_digests else ()
        event = RequestEvent(
            kind,
            live.req_id,
            block_ids=run.block_ids,
            num_computed_tokens=run.start,
            num_scheduled_tokens=run.num_tokens,
            num_known_tokens=known,
            block_digests=digests,
            # As vLLM tells it: not of a request that it knows.
            adapter_id=0 if kind is RequestEventKind.RESUMED else live.track.request.adapter_id,
        )
    else:
        first_added = len(live.block_ids) - len(plan.added)
        digests = _digests(live, first_added) if config.block_digests else ()
        if plan.added:
            event = RequestEvent(
                RequestEventKind.EXTENDED, live.req_id, block_ids=tuple(plan.added), block_digests=digests
            )
        if config.block_digests:
            filled = [
                FilledBlock(live.block_ids[index], live.hashed[index].digest)
                for index in range(live.num_digests_told, min(first_added, len(live.hashed)))
            ]
    live.entry, live.told = None, True
    live.num_digests_told = min(len(live.block_ids), len(live.hashed))
    return event, filled


def _kind(entry: Entry, preemption: Preemption) -> RequestEventKind:
    if entry is Entry.REPLACED:
        return RequestEventKind.REPLACED
    if entry is Entry.RESUMED and preemption is not Preemption.RECOMPUTE_V2:
        return RequestEventKind.RESUMED
    return RequestEventKind.STARTED


def _digests(live: LiveRequest, first: int) -> tuple[int, ...]:
    known = len(live.hashed)
    return tuple(live.hashed[index].digest if index < known else 0 for index in range(first, len(live.block_ids)))
