# SPDX-License-Identifier: Apache-2.0
"""Decides what each step computes, as vLLM's scheduler does, and says it as the events an engine adapter would make.

Running requests come first, then waiting ones, while the token budget lasts; long prompts are cut into chunks; a
block's hash is published when the block is allocated, so a request admitted later in the same step can hit it.
Admission reserves every block a request may come to need, so nothing is ever preempted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from omni_core.prefix_cache.events import BlockCopy, RequestEvent, RequestEventKind, StepEvents
from omni_core.testing.sim_allocator import HashedBlock, SimBlockAllocator, extend_hashed_blocks, salt_hash
from omni_core.testing.sim_request import SimRequest, TokenTrack


class LostForward(Enum):
    """What becomes of the requests of a step whose forward never ran."""

    ABORTED = "aborted"
    RETRIED = "retried"
    """Their next step starts where the lost one did."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of the simulated scheduler."""

    num_blocks: int
    """KV blocks, the null block included."""
    block_size: int
    max_num_tokens: int
    """Token budget of a step (vLLM: `max_num_batched_tokens`)."""
    max_num_requests: int = 16
    """Requests that run at one time (vLLM: `max_num_seqs`)."""
    max_chunk_tokens: int | None = None
    """Most prompt tokens of one request in one step (vLLM: `long_prefill_token_threshold`)."""
    partial_block_hits: bool = False
    """Whether a hit may end inside a block: that block is copied, as vLLM does where its match unit is smaller."""


@dataclass(frozen=True, slots=True)
class ScheduledRun:
    """Positions `[start, stop)` of one request, to be computed in this step."""

    track: TokenTrack
    start: int
    stop: int
    block_ids: tuple[int, ...]
    """The request's whole table at this step."""
    first: bool
    """The request's first step that runs: `[0, start)` is its prefix hit."""

    @property
    def req_id(self) -> str:
        """The request's id."""
        return self.track.req_id

    @property
    def num_tokens(self) -> int:
        """Rows the run brings."""
        return self.stop - self.start

    @property
    def is_chunk(self) -> bool:
        """Whether the run is one of several that the prompt was cut into, or ends short of the prompt."""
        prompt = len(self.track.request.prompt_token_ids)
        return self.stop < prompt or (not self.first and self.start < prompt)


@dataclass(frozen=True, slots=True)
class SimSchedule:
    """One step as scheduled."""

    number: int
    """Counts the calls of `schedule`, from 0."""
    events: StepEvents
    runs: tuple[ScheduledRun, ...]

    @property
    def num_tokens(self) -> int:
        """Rows the step would compute."""
        return sum(run.num_tokens for run in self.runs)


@dataclass(slots=True)
class _Running:
    track: TokenTrack
    block_ids: list[int]
    num_computed: int
    max_blocks: int
    ran: bool = False
    """Whether a forward computed any of it."""
    hashed: list[HashedBlock] = field(default_factory=list)
    num_published: int = 0


class SimScheduler:
    """The scheduler. Engine thread only."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.allocator = SimBlockAllocator(config.num_blocks, config.block_size)
        self._waiting: deque[SimRequest] = deque()
        self._running: dict[str, _Running] = {}
        self._ended: list[RequestEvent] = []
        self._copy_sources: list[int] = []
        self._published_now: set[int] = set()
        self._num_schedules = 0

    @property
    def waiting(self) -> tuple[str, ...]:
        """Ids of requests not yet admitted, first to be admitted first."""
        return tuple(request.req_id for request in self._waiting)

    @property
    def running(self) -> tuple[str, ...]:
        """Ids of admitted requests that have not ended."""
        return tuple(self._running)

    @property
    def has_news(self) -> bool:
        """Whether a step would compute or report anything."""
        return bool(self._waiting or self._running or self._ended)

    def add(self, request: SimRequest) -> None:
        """Queue a request.

        Raises:
            ValueError: the id is in use, or the request could never be admitted.
        """
        if request.req_id in self._running or request.req_id in self.waiting:
            raise ValueError(f"request {request.req_id!r} is already waiting or running")
        needed = self._blocks_for(request.max_rows)
        if needed > self.config.num_blocks - 1:
            raise ValueError(
                f"request {request.req_id!r} needs {needed} blocks; num_blocks={self.config.num_blocks} has "
                f"{self.config.num_blocks - 1} to give"
            )
        self._waiting.append(request)

    def abort(self, req_id: str) -> bool:
        """End a request at once: its blocks are free now, and the next schedule reports it. `False`: not known."""
        for request in self._waiting:
            if request.req_id == req_id:
                self._waiting.remove(request)
                break
        else:
            if req_id not in self._running:
                return False
            self._release(req_id)
        self._ended.append(RequestEvent(RequestEventKind.ABORTED, req_id))
        return True

    def schedule(self) -> SimSchedule:
        """Decide the next step, allocate its blocks and publish their hashes."""
        events, self._ended = self._ended, []
        copies: list[BlockCopy] = []
        runs: list[ScheduledRun] = []
        self._published_now.clear()
        budget = self.config.max_num_tokens
        for running in self._running.values():
            if budget == 0:
                break
            count = self._chunk(running, budget)
            added = self._grow(running, count)
            if added:
                events.append(RequestEvent(RequestEventKind.EXTENDED, running.track.req_id, tuple(added)))
            runs.append(self._run(running, count))
            budget -= count
        while self._waiting and budget and len(self._running) < self.config.max_num_requests:
            admitted = self._admit(self._waiting[0], copies)
            if admitted is None:
                break
            self._waiting.popleft()
            count = self._chunk(admitted, budget)
            self._grow(admitted, count)
            self._running[admitted.track.req_id] = admitted
            run = self._run(admitted, count)
            events.append(
                RequestEvent(RequestEventKind.STARTED, run.req_id, run.block_ids, admitted.num_computed, count)
            )
            runs.append(run)
            budget -= count
        self._num_schedules += 1
        return SimSchedule(self._num_schedules - 1, StepEvents(tuple(events), tuple(copies)), tuple(runs))

    def complete(self, schedule: SimSchedule, sample: Callable[[TokenTrack], int]) -> tuple[str, ...]:
        """Take in that the step ran: sample where all known tokens are computed, end what is done.

        Returns:
            Ids that finished: their blocks are free now, and the next schedule reports them.
        """
        self._release_copy_sources()
        finished = []
        for run in schedule.runs:
            running = self._running.get(run.req_id)
            if running is None:
                continue
            running.num_computed = run.stop
            running.ran = True
            if run.stop < len(run.track.token_ids):
                continue
            if run.stop == run.track.request.max_rows:
                finished.append(run.req_id)
                self._release(run.req_id)
                self._ended.append(RequestEvent(RequestEventKind.FINISHED, run.req_id))
            else:
                run.track.token_ids.append(sample(run.track))
        return tuple(finished)

    def lose(self, schedule: SimSchedule, what_then: LostForward) -> tuple[str, ...]:
        """Take in that the step never ran. Published hashes stay, as they do in vLLM.

        Returns:
            Ids that were aborted for it.
        """
        self._release_copy_sources()
        if what_then is LostForward.RETRIED:
            return ()
        return tuple(run.req_id for run in schedule.runs if self.abort(run.req_id))

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.block_size)

    def _chunk(self, running: _Running, budget: int) -> int:
        count = min(budget, len(running.track.token_ids) - running.num_computed)
        return count if self.config.max_chunk_tokens is None else min(count, self.config.max_chunk_tokens)

    def _run(self, running: _Running, count: int) -> ScheduledRun:
        start = running.num_computed
        return ScheduledRun(running.track, start, start + count, tuple(running.block_ids), not running.ran)

    def _grow(self, running: _Running, count: int) -> list[int]:
        stop = running.num_computed + count
        added = self.allocator.allocate(self._blocks_for(stop) - len(running.block_ids))
        running.block_ids.extend(added)
        extend_hashed_blocks(running.hashed, running.track, self.config.block_size)
        for index in range(running.num_published, stop // self.config.block_size):
            self.allocator.publish(running.block_ids[index], running.hashed[index])
            self._published_now.add(running.block_ids[index])
            running.num_published = index + 1
        return added

    def _admit(self, request: SimRequest, copies: list[BlockCopy]) -> _Running | None:
        track = TokenTrack(request)
        hashed: list[HashedBlock] = []
        extend_hashed_blocks(hashed, track, self.config.block_size)
        max_hit = len(request.prompt_token_ids) - 1
        hit = self.allocator.find_prefix(hashed, max_hit)
        owed = sum(running.max_blocks - len(running.block_ids) for running in self._running.values())
        max_blocks = self._blocks_for(request.max_rows)
        available = self.allocator.num_free_blocks - owed - sum(self.allocator.is_free(block) for block in hit)
        if max_blocks - len(hit) > available:
            return None
        self.allocator.touch(hit)
        admitted = _Running(
            track, list(hit), len(hit) * self.config.block_size, max_blocks, hashed=hashed, num_published=len(hit)
        )
        # One spare block, because holding the source may keep a free block from those the running requests are owed.
        if self.config.partial_block_hits and max_blocks - len(hit) < available:
            self._hit_inside_next_block(admitted, max_hit, copies)
        return admitted

    def _hit_inside_next_block(self, admitted: _Running, max_hit: int, copies: list[BlockCopy]) -> None:
        start = admitted.num_computed
        stop = min(start + self.config.block_size, max_hit)
        wanted = admitted.track.content(start, stop)
        depth = len(admitted.block_ids)
        parent = admitted.hashed[depth - 1].block_hash if depth else salt_hash(admitted.track.request.salt)
        source, shared = self.allocator.find_inside(parent, wanted, self._published_now)
        if source is None:
            return
        self.allocator.touch([source])
        self._copy_sources.append(source)
        (destination,) = self.allocator.allocate(1)
        admitted.block_ids.append(destination)
        admitted.num_computed = start + shared
        copies.append(BlockCopy(source, destination))

    def _release(self, req_id: str) -> None:
        self.allocator.free(self._running.pop(req_id).block_ids)

    def _release_copy_sources(self) -> None:
        for source in self._copy_sources:
            self.allocator.free([source])
        self._copy_sources.clear()
