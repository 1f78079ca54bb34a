# SPDX-License-Identifier: Apache-2.0
"""Decides what each step computes, as vLLM's scheduler does, and says it as the events an engine adapter would make.

Running requests come first, then waiting ones, while the token budget lasts; long prompts are cut into chunks; a
block's hash is published when the block is allocated, so a request admitted later in the same step can hit it. When no
block is free the last running request is preempted, or, if the configuration says so, admission reserves every block.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence

from omni_core.prefix_cache.events import FilledBlock, RequestEvent, RequestEventKind, StepEvents
from omni_core.testing.engine_schedule import LostForward, SampledTokens, ScheduledRun, SimSchedule
from omni_core.testing.scheduler_config import Preemption, SchedulerConfig
from omni_core.testing.sim_live import Entry, LiveRequest, Plan, announce
from omni_core.testing.sim_request import SimRequest, TokenTrack
from omni_core.testing.sim_tables import SimTables

DraftProposer = Callable[[TokenTrack], Sequence[int]]
"""Guesses the next tokens of a request; none, some or all of them are right."""


def no_drafts(track: TokenTrack) -> Sequence[int]:
    """The proposer that never guesses."""
    return ()


class SimScheduler:
    """The scheduler. Engine thread only.

    Args:
        config: limits, and how often it does what is rare.
        propose_drafts: asked for each decode step if the configuration has drafts.
    """

    def __init__(self, config: SchedulerConfig, propose_drafts: DraftProposer = no_drafts) -> None:
        self.config = config
        self._tables = SimTables(config)
        self.allocator = self._tables.allocator
        self._propose_drafts = propose_drafts
        self._rng = random.Random(f"scheduler {config.mishaps.seed}")
        self._waiting: deque[LiveRequest] = deque()
        self._running: dict[str, LiveRequest] = {}
        self._ended: list[RequestEvent] = []
        self._plans: list[Plan] = []
        self._blocked = False
        self._num_schedules = 0

    @property
    def waiting(self) -> tuple[str, ...]:
        """Ids of requests that wait to be admitted, for the first time or again."""
        return tuple(live.req_id for live in self._waiting)

    @property
    def running(self) -> tuple[str, ...]:
        """Ids of admitted requests that have not ended."""
        return tuple(self._running)

    @property
    def has_news(self) -> bool:
        """Whether a step would compute or report anything, now or later."""
        return bool(self._waiting or self._running or self._ended)

    # -- between two steps --------------------------------------------------------------------------------------------

    def add(self, request: SimRequest) -> None:
        """Queue a request.

        Raises:
            ValueError: the id is in use, or the request could never be admitted.
        """
        if self._find(request.req_id) is not None:
            raise ValueError(f"request {request.req_id!r} is already waiting or running")
        self._check_size(request)
        self._waiting.append(LiveRequest.of(request))

    def abort(self, req_id: str) -> bool:
        """End a request at once: its blocks are free now, and the next schedule reports it. `False`: not known."""
        live = self._find(req_id)
        if live is None:
            return False
        self._drop(live)
        self._ended.append(RequestEvent(RequestEventKind.ABORTED, req_id))
        return True

    def preempt(self, req_id: str, *, hold: int = 0) -> bool:
        """Take a running request's blocks away; it comes back with a fresh hit. `False`: it is not running.

        Args:
            req_id: the request.
            hold: schedules that pass before it may come back.
        """
        if self.config.preemption is Preemption.NEVER or req_id not in self._running:
            return False
        self._preempt(self._running[req_id], hold)
        return True

    def reset_prefix_cache(self) -> bool:
        """Preempt what runs and forget every hash, as vLLM does with `reset_running_requests`.

        Returns:
            `False`, and no hash is forgotten, if requests hold blocks that cannot be taken from them.
        """
        if self.config.preemption is Preemption.NEVER and any(live.block_ids for live in self._lives()):
            return False
        for live in reversed(tuple(self._running.values())):
            self._preempt(live, 0)
        self._free_waiting_blocks()
        self.allocator.forget_all_hashes()
        return True

    def replace(self, request: SimRequest) -> bool:
        """Give a request that has not ended other content; its computed prefix stays where both agree.

        Returns:
            `False`: the id is not known, or its new content could never be admitted.
        """
        live = self._find(request.req_id)
        if live is None or self._tables.max_blocks(request) > self.config.num_blocks - 1:
            return False
        if not live.block_ids:
            live.take_content(request)
            return True
        if self.config.preemption is Preemption.NEVER and not self._tables.can_reserve(request, self._lives(), live):
            return False
        kept = live.take_content(request)
        self._tables.keep_prefix(live, kept, self._rng)
        return True

    # -- one step -----------------------------------------------------------------------------------------------------

    def schedule(self) -> SimSchedule:
        """Decide the next step, allocate its blocks and publish their hashes."""
        mishaps, rng = self.config.mishaps, self._rng
        self._plans, self._blocked = [], False
        self._tables.begin_schedule()
        if self._running and rng.random() < mishaps.preempted:
            self._preempt(self._running[rng.choice(self.running)], rng.randint(0, 3))
        budget, pressed = self._schedule_running(self.config.max_num_tokens)
        if not pressed:
            budget = self._schedule_waiting(budget)
        if self._blocked and not self._running and self.config.preemption is not Preemption.NEVER:
            self._free_waiting_blocks()
            self._schedule_waiting(budget)
        takeable = [plan for plan in self._plans if plan.published and not plan.copies]
        if takeable and rng.random() < mishaps.taken_back:
            self._take_back(rng.choice(takeable))
        self._num_schedules += 1
        return self._announced()

    def complete(self, schedule: SimSchedule, sampled: SampledTokens) -> tuple[str, ...]:
        """Take in that the step ran: accept what was sampled, end what is done.

        Returns:
            Ids that finished: their blocks are free now, and the next schedule reports them.
        """
        self._tables.end_step()
        finished = []
        for run in schedule.runs:
            live = self._running.get(run.req_id)
            if live is None or live.track is not run.track:
                continue
            tokens = sampled.get(run.req_id, ())
            live.num_computed = run.known_stop + max(0, len(tokens) - 1)
            live.track.token_ids.extend(tokens)
            if live.waits_for_piece:
                del self._running[run.req_id]
                live.entry = Entry.CONTINUED
                live.not_before = self._num_schedules + self._rng.randint(0, self.config.mishaps.piece_delay)
                self._waiting.append(live)
            elif live.num_computed == run.track.request.max_rows:
                finished.append(run.req_id)
                self._drop(live)
                self._ended.append(RequestEvent(RequestEventKind.FINISHED, run.req_id))
        return tuple(finished)

    def lose(self, schedule: SimSchedule, what_then: LostForward) -> tuple[str, ...]:
        """Take in that the step never ran. Published hashes stay, as they do in vLLM.

        Returns:
            Ids that were aborted for it.
        """
        self._tables.end_step()
        if what_then is LostForward.RETRIED:
            return ()
        return tuple(run.req_id for run in schedule.runs if self.abort(run.req_id))

    # -- inside a schedule --------------------------------------------------------------------------------------------

    def _schedule_running(self, budget: int) -> tuple[int, bool]:
        pressed = False
        for live in tuple(self._running.values()):
            if budget == 0 or live.req_id not in self._running:
                break
            drafts = self._drafts(live, budget)
            stop = live.num_computed + self._chunk(live, budget) + len(drafts)
            while not self._tables.can_grow(live, stop):
                pressed = True
                victim = next(reversed(self._running.values()))
                self._preempt(victim, 0)
                if victim is live:
                    return budget, pressed
            budget -= self._plan(live, stop, drafts)
        return budget, pressed

    def _schedule_waiting(self, budget: int) -> int:
        self._blocked = False
        for live in tuple(self._waiting):
            if not budget or len(self._running) >= self.config.max_num_requests:
                break
            if live.not_before > self._num_schedules or (self._blocked and not live.block_ids):
                continue
            if live.waits_for_piece:
                live.receive_piece()
            if not self._tables.admit(live, self._chunk_limit(budget), self._lives()):
                self._blocked = True
                continue
            self._waiting.remove(live)
            self._running[live.req_id] = live
            budget -= self._plan(live, live.num_computed + self._chunk(live, budget), ())
        return budget

    def _plan(self, live: LiveRequest, stop: int, drafts: Sequence[int]) -> int:
        start = live.num_computed
        added, published = self._tables.grow(live, stop, stop - len(drafts))
        samples = stop - len(drafts) == live.num_known and not live.pieces
        run = ScheduledRun(live.track, start, stop, tuple(live.block_ids), samples, tuple(drafts))
        self._plans.append(Plan(live, run, added, published, self._tables.take_copies(live)))
        return run.num_tokens

    def _drafts(self, live: LiveRequest, budget: int) -> Sequence[int]:
        if not self.config.max_draft_tokens or not live.decodes:
            return ()
        most = min(self.config.max_draft_tokens, budget - 1, live.track.request.max_rows - live.num_known)
        return self._propose_drafts(live.track)[: max(0, most)]

    def _chunk(self, live: LiveRequest, budget: int) -> int:
        return min(live.num_known - live.num_computed, self._chunk_limit(budget))

    def _chunk_limit(self, budget: int) -> int:
        return budget if self.config.max_chunk_tokens is None else min(budget, self.config.max_chunk_tokens)

    def _take_back(self, plan: Plan) -> None:
        self._plans.remove(plan)
        self._preempt(plan.live, self._rng.randint(0, 3))

    def _announced(self) -> SimSchedule:
        events, self._ended = self._ended, []
        filled: list[FilledBlock] = []
        for plan in self._plans:
            event, newly_filled = announce(plan, self.config)
            events.extend([] if event is None else [event])
            filled.extend(newly_filled)
        copies = tuple(copy for plan in self._plans for copy in plan.copies)
        runs = tuple(plan.run for plan in self._plans)
        return SimSchedule(self._num_schedules - 1, StepEvents(tuple(events), copies, tuple(filled)), runs)

    # -- requests -----------------------------------------------------------------------------------------------------

    def _check_size(self, request: SimRequest) -> None:
        needed = self._tables.max_blocks(request)
        if needed > self.config.num_blocks - 1:
            raise ValueError(
                f"request {request.req_id!r} needs {needed} blocks; num_blocks={self.config.num_blocks} has "
                f"{self.config.num_blocks - 1} to give"
            )

    def _find(self, req_id: str) -> LiveRequest | None:
        live = self._running.get(req_id)
        return live or next((waiting for waiting in self._waiting if waiting.req_id == req_id), None)

    def _lives(self) -> list[LiveRequest]:
        return [*self._running.values(), *self._waiting]

    def _preempt(self, live: LiveRequest, hold: int) -> None:
        self._drop(live)
        live.lose_blocks()
        live.not_before = self._num_schedules + hold
        self._waiting.appendleft(live)

    def _drop(self, live: LiveRequest) -> None:
        if self._running.pop(live.req_id, None) is None:
            self._waiting.remove(live)
        self._tables.free(live)

    def _free_waiting_blocks(self) -> None:
        """Nothing runs and nothing fits: requests that wait for a piece of prompt hold the blocks others need."""
        for live in self._waiting:
            self._tables.free(live)
            live.lose_blocks()
