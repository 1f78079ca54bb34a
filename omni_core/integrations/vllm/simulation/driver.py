# SPDX-License-Identifier: Apache-2.0
"""vLLM's `Scheduler` in place of the simulated one: its outputs reach the cache through the adapter that engines use.

The worker's side is simulated: it keeps each request's table from the outputs alone, samples, and gives tokens and
drafts back as vLLM's engine core does (`v1/engine/core.py`, `step` and `post_step`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import RequestStatus

from omni_core.integrations.vllm.simulation.block_digests import with_digests
from omni_core.integrations.vllm.simulation.client_requests import RequestMaker
from omni_core.integrations.vllm.simulation.engine_config import build_scheduler
from omni_core.integrations.vllm.simulation.followed_request import FollowedRequest, SchedulerMismatchError
from omni_core.integrations.vllm.simulation.happenings import Happening, HappeningCounter
from omni_core.integrations.vllm.simulation.shape import VllmShape
from omni_core.integrations.vllm.step_events import step_events
from omni_core.testing.engine_schedule import LostForward, SampledTokens, ScheduledRun, SimSchedule
from omni_core.testing.scheduler_config import SchedulerConfig
from omni_core.testing.sim_request import SimRequest, TokenTrack

DraftProposer = Callable[[TokenTrack], Sequence[int]]
"""Guesses the next tokens of a request."""

_MAX_STALLED_SCHEDULES = 4


class VllmSchedulerDriver:
    """An `EngineScheduler` that asks vLLM's. Engine thread only; never blocks.

    `Preemption.RECOMPUTE_V2` gives outputs the form for vLLM's second model runner; the other values are alike here,
    because vLLM preempts when it must. `mishaps.preempted` is the chance that all running requests are preempted by a
    reset of the prefix cache, `mishaps.taken_back` above 0 selects the priority policy.

    Args:
        config: limits; `num_blocks` counts the blocks of all KV groups.
        shape: further settings of vLLM's.
        propose_drafts: asked after each decode step if the configuration has drafts.
        priority_of: for the priority policy; the lower, the sooner. Default: random.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        shape: VllmShape,
        propose_drafts: DraftProposer = lambda track: (),
        priority_of: Callable[[SimRequest], int] | None = None,
    ) -> None:
        self.config = config
        self.shape = shape
        self.witness = HappeningCounter(config.block_size)
        self._built = build_scheduler(config, shape)
        self._scheduler = self._built.scheduler
        self._make = RequestMaker(self._built.block_hasher)
        self._propose_drafts = propose_drafts
        self._rng = random.Random(f"vllm {config.mishaps.seed}")
        self._priority_of = priority_of or (lambda request: self._rng.randint(0, 2))
        self._live: dict[str, FollowedRequest] = {}
        self._output: Any = None
        """vLLM's output of the schedule that is neither complete nor lost."""
        self._in_step: dict[str, FollowedRequest] = {}
        """The requests it computes, in its order."""
        self._unprocessed: tuple[Any, Any] | None = None
        """Where scheduling runs ahead: an output and its tokens, of which the scheduler hears one schedule later."""
        self._num_schedules = 0
        self._num_stalled = 0

    @property
    def waiting(self) -> tuple[str, ...]:
        """Ids of requests that wait to be admitted, to come back, or for the next part of their prompt."""
        running = set(self.running)
        return tuple(req_id for req_id in self._live if req_id not in running)

    @property
    def running(self) -> tuple[str, ...]:
        """Ids of admitted requests that have not ended."""
        return tuple(request.request_id for request in self._scheduler.running)

    @property
    def has_news(self) -> bool:
        """Whether a step would compute or report anything, now or later."""
        return bool(self._live or self._unprocessed) or self._scheduler.has_requests()

    # -- between two steps --------------------------------------------------------------------------------------------

    def add(self, request: SimRequest) -> None:
        """Queue a request.

        Raises:
            ValueError: the id is in use, or the request could never be admitted.
        """
        if request.req_id in self._live:
            raise ValueError(f"request {request.req_id!r} is already waiting or running")
        num_tokens = request.num_prompt_tokens + request.max_output_tokens
        needed = self.shape.blocks_for(self.config, num_tokens)
        if needed > self.config.num_blocks - 1 or num_tokens > self.shape.max_model_len:
            raise ValueError(
                f"request {request.req_id!r} of {num_tokens} tokens may need {needed} blocks; "
                f"num_blocks={self.config.num_blocks}, max_model_len={self.shape.max_model_len}"
            )
        priority = self._priority_of(request) if self.config.mishaps.taken_back else 0
        made = self._make.first(request, priority=priority)
        followed = FollowedRequest.of(made, request)
        followed.next_piece_at = self._num_schedules + self._rng.randint(0, self.config.mishaps.piece_delay)
        self._live[request.req_id] = followed
        self._scheduler.add_request(made)

    def abort(self, req_id: str) -> bool:
        """End a request at once: its blocks are free now, and the next schedule reports it. `False`: not known."""
        followed = self._live.pop(req_id, None)
        if followed is None:
            return False
        self.witness.ended(followed, while_preempted=followed.request.status == RequestStatus.PREEMPTED)
        self._scheduler.finish_requests(req_id, RequestStatus.FINISHED_ABORTED)
        return True

    # -- one step -----------------------------------------------------------------------------------------------------

    def schedule(self) -> SimSchedule:
        """Have vLLM decide the next step, and tell it afterwards what it need not know before.

        Raises:
            SchedulerMismatchError: vLLM did what the adapter holds for impossible.
        """
        self._send_pieces()
        self._reset_sometimes()
        output = self._output = self._scheduler.schedule()
        events = step_events(output, self._built.mirrored_group)
        self._follow(output)
        in_step = self._in_step = {req_id: self._live[req_id] for req_id in output.num_scheduled_tokens}
        self._process_sampled()
        if self.config.block_digests:
            events = with_digests(events, in_step, self._built.hashes_per_block)
        runs = tuple(self._run(followed, output) for followed in in_step.values())
        self._num_schedules += 1
        self._note(output, runs)
        self._resolve_stall(stalled=not runs)
        return SimSchedule(self._num_schedules - 1, events, runs)

    def complete(self, schedule: SimSchedule, sampled: SampledTokens) -> tuple[str, ...]:
        """Take in that the step ran.

        Returns:
            Ids that finished. Where scheduling runs ahead, vLLM hears of it one schedule later: then none.
        """
        output, self._output = self._output, None
        for run in schedule.runs:
            tokens = sampled.get(run.req_id, ())
            # Also of a request that has ended: its rows are judged by what was sampled.
            self._in_step[run.req_id].accept(run.known_stop, tokens)
            if run.drafts:
                self.witness.sampled(len(run.drafts), len(tokens))
        self._unprocessed = (output, _runner_output(output, sampled))
        if self.shape.async_scheduling and schedule.runs:
            return ()
        finished = self._process_sampled()
        self._propose([run.req_id for run in schedule.runs if sampled.get(run.req_id)])
        return finished

    def lose(self, schedule: SimSchedule, what_then: LostForward) -> tuple[str, ...]:
        """Take in that the step never ran. vLLM has no second try: its requests are aborted, whatever was asked for."""
        self._output = None
        return tuple(run.req_id for run in schedule.runs if self.abort(run.req_id))

    # -- following the outputs ----------------------------------------------------------------------------------------

    def _follow(self, output: Any) -> None:
        group = self._built.mirrored_group
        for new in output.scheduled_new_reqs:
            followed = self._live[new.req_id]
            self.witness.entered(followed, new.num_computed_tokens, told_as_new=True)
            followed.enter(new.block_ids[group], new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for req_id, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            followed, added = self._live[req_id], () if blocks is None else blocks[group]
            if req_id in cached.resumed_req_ids:
                self.witness.entered(followed, computed, told_as_new=False)
                followed.enter(added, computed)
            else:
                followed.extend(added, computed, runs_ahead=self.shape.async_scheduling)
        for req_id in output.num_scheduled_tokens:
            self._check_table(self._live[req_id])

    def _check_table(self, followed: FollowedRequest) -> None:
        table = self._scheduler.kv_cache_manager.get_block_ids(followed.req_id)[self._built.mirrored_group]
        if table != followed.block_ids:
            raise SchedulerMismatchError(
                f"request {followed.req_id!r}: vLLM's table is {table}, its outputs add up to {followed.block_ids}"
            )
        if len(table) > self._built.table_width:
            raise SchedulerMismatchError(
                f"request {followed.req_id!r} has {len(table)} blocks; a row of vLLM's block table has room for "
                f"{self._built.table_width} (max_model_len={self.shape.max_model_len})"
            )

    def _run(self, followed: FollowedRequest, output: Any) -> ScheduledRun:
        start = followed.num_computed
        stop = start + output.num_scheduled_tokens[followed.req_id]
        drafts = tuple(output.scheduled_spec_decode_tokens.get(followed.req_id, ()))
        known_stop = stop - len(drafts)
        if known_stop > followed.num_known or stop > self.shape.max_model_len:
            raise SchedulerMismatchError(
                f"request {followed.req_id!r} runs [{start}, {stop}) with {len(drafts)} drafts, "
                f"but {followed.num_known} tokens are known and max_model_len={self.shape.max_model_len}"
            )
        if self.shape.async_scheduling and drafts and self._was_running(followed.req_id, output):
            # vLLM schedules placeholders; the worker has the tokens.
            proposed = tuple(self._propose_drafts(followed.track))
            drafts = (*proposed, *drafts)[: len(drafts)]
        samples = known_stop == followed.num_known
        return ScheduledRun(followed.track, start, stop, tuple(followed.block_ids), samples, drafts)

    def _was_running(self, req_id: str, output: Any) -> bool:
        cached = output.scheduled_cached_reqs
        return req_id in cached.req_ids and req_id not in cached.resumed_req_ids

    # -- what vLLM is told --------------------------------------------------------------------------------------------

    def _process_sampled(self) -> tuple[str, ...]:
        """Tell the scheduler what came of the last step it has not heard of; returns ids that finished."""
        if self._unprocessed is None:
            return ()
        self._scheduler.update_from_output(*self._unprocessed)
        self._unprocessed = None
        finished = tuple(req_id for req_id, followed in self._live.items() if followed.request.is_finished())
        for req_id in finished:
            self.witness.ended(self._live.pop(req_id), while_preempted=False)
        return finished

    def _propose(self, req_ids: Sequence[str]) -> None:
        tracks = {req_id: self._live[req_id].track for req_id in req_ids if req_id in self._live}
        if self.config.max_draft_tokens and tracks:
            drafts = [list(self._propose_drafts(track)) for track in tracks.values()]
            self._scheduler.update_draft_token_ids(DraftTokenIds(list(tracks), drafts))

    def _send_pieces(self, *, hurry: bool = False) -> None:
        for followed in self._live.values():
            asked = followed.track.request
            while followed.num_pieces_sent < len(asked.later_pieces):
                if followed.next_piece_at > self._num_schedules and not hurry:
                    break
                self._scheduler.add_request(self._make.piece(asked, followed.num_pieces_sent))
                followed.num_pieces_sent += 1
                followed.next_piece_at = self._num_schedules + self._rng.randint(0, self.config.mishaps.piece_delay)
                if followed.num_pieces_sent == len(asked.later_pieces):
                    self._scheduler.add_request(self._make.end(asked))

    def _reset_sometimes(self) -> None:
        # vLLM refuses to while a session that waits holds blocks; before 0.31 it kept no list of those.
        possible = self.running and not vars(self._scheduler).get("kv_holding_waiting")
        if self._rng.random() < self.config.mishaps.preempted and possible:
            self._scheduler.reset_prefix_cache(reset_running_requests=True)
            self.witness.counts[Happening.PREFIX_CACHE_RESET] += 1

    def _resolve_stall(self, *, stalled: bool) -> None:
        """Sessions that wait for input may hold the blocks that all others need; vLLM does not preempt them."""
        self._num_stalled = self._num_stalled + 1 if stalled and self._live else 0
        if self._num_stalled:
            self._send_pieces(hurry=True)
        if self._num_stalled <= _MAX_STALLED_SCHEDULES:
            return
        sessions = [req_id for req_id in self.waiting if self._live[req_id].request.resumable]
        if not sessions:
            raise SchedulerMismatchError(f"vLLM schedules nothing of {list(self._live)}, and no session is in the way")
        self.abort(sessions[-1])
        self.witness.counts[Happening.SESSION_GAVE_UP] += 1

    def _note(self, output: Any, runs: Sequence[ScheduledRun]) -> None:
        tables = {block_id for followed in self._in_step.values() for block_id in followed.block_ids}
        self.witness.scheduled(output, runs, tables)
        ended = sum(followed.request.is_finished() for followed in self._in_step.values())
        self.witness.counts[Happening.RAN_AFTER_END] += ended


def _runner_output(output: Any, sampled: Mapping[str, Sequence[int]]) -> Any:
    req_ids = list(output.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=req_ids,
        req_id_to_index={req_id: index for index, req_id in enumerate(req_ids)},
        sampled_token_ids=[list(sampled.get(req_id, ())) for req_id in req_ids],
    )
