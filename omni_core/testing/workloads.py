# SPDX-License-Identifier: Apache-2.0
"""Seeded random workloads for one simulated stage, and a report of what was checked.

A workload mixes what a cache finds hard: prompts that share prefixes, cold bursts of equal prompts, a block pool so
small that blocks change hands all the time and requests are preempted, prompts that arrive in pieces, contents that are
replaced, ids that are used again, drafts that are rejected, keys that come in some steps only, aborts at every point,
forwards that never run, and outputs built late, out of order, for some requests only, never, or never acknowledged.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import replace

from omni_core.runtime import Runtime
from omni_core.testing.engine_schedule import LostForward, ScheduledRun, SimSchedule
from omni_core.testing.fake_model import FakeModel
from omni_core.testing.output_builder import BuiltStep
from omni_core.testing.sim_request import SimRequest, adapter_of
from omni_core.testing.sim_scheduler import SimScheduler
from omni_core.testing.sim_stage import CacheFactory, CacheWrapper, SchedulerFactory, SimStage
from omni_core.testing.sim_step import NO_FAULTS, SavedStep, StepFaults
from omni_core.testing.workload_config import WorkloadConfig
from omni_core.testing.workload_report import WorkloadReport, describe, total_rows
from omni_core.testing.workload_requests import SALTS, RequestSource

__all__ = ["WorkloadConfig", "WorkloadReport", "describe", "run_workload", "total_rows"]

_MOST_RESETS = 4
"""Of the engine's prefix cache: each makes long prompts begin anew, so many of them would never end."""


def run_workload(
    seed: int,
    config: WorkloadConfig | None = None,
    *,
    runtime: Runtime | None = None,
    make_cache: CacheFactory | None = None,
    make_scheduler: SchedulerFactory | None = None,
    wrap_cache: CacheWrapper | None = None,
) -> WorkloadReport:
    """Run one workload and judge every delivery. Blocks until it is done: a fraction of a second.

    Args:
        seed: decides every random choice; with a single-threaded builder the run is the same each time.
        config: default: the one `seed` draws.
        runtime: default: real threads.
        make_cache: another cache than the real one, to try the judge.
        make_scheduler: another scheduler than the simulated one; contents are replaced by the simulated one only.
        wrap_cache: put around the real cache, to watch it or to break it.

    Raises:
        OracleViolationError: a delivery was wrong. A note on it names the seed, the step and the configuration.
        OmniPrefixCacheError: the cache raised where a right one does not.
    """
    config = config or WorkloadConfig.draw(seed)
    workload = _Workload(seed, config, runtime, make_cache, make_scheduler, wrap_cache)
    try:
        return workload.run()
    except Exception as error:
        error.add_note(f"workload seed={seed}, step {workload.num_steps}, {config}")
        raise


class _Workload:
    def __init__(
        self,
        seed: int,
        config: WorkloadConfig,
        runtime: Runtime | None,
        make_cache: CacheFactory | None,
        make_scheduler: SchedulerFactory | None,
        wrap_cache: CacheWrapper | None,
    ) -> None:
        self._seed = seed
        self._config = config
        self._rng = random.Random(seed)
        self._stage = SimStage(
            config.stage,
            FakeModel(config.hidden, config.keys),
            runtime=runtime,
            make_cache=make_cache,
            make_scheduler=make_scheduler,
            wrap_cache=wrap_cache,
        )
        self._source = RequestSource(config, self._rng)
        self._due: dict[int, int] = {}
        self.num_steps = 0
        self._num_aborted = 0
        self._num_replaced = 0
        self._num_weights_changed = 0
        self._change_under_way = False
        self._resets_left = _MOST_RESETS

    def run(self) -> WorkloadReport:
        with self._stage as stage:
            if not self._config.stage.declare_keys:
                self._first_step_decides_keys()
            while self._source.num_made < self._config.num_requests or stage.engine.scheduler.has_news:
                self._submit_some()
                self._replace_some()
                self._abort_some()
                self._change_weights()
                self._consume_due_steps()
                self._step()
                if self._rng.random() < self._config.likelihoods.collected:
                    stage.collect(acknowledged=self._acknowledged)
            stage.finish()
            oracle, stats = stage.oracle, stage.stats()
            return WorkloadReport(
                seed=self._seed,
                config=self._config,
                num_steps=self.num_steps,
                num_requests=self._source.num_made,
                rows=oracle.counts,
                rows_delivered=oracle.rows_delivered,
                rows_computed=stage.tap.num_rows,
                requests_failed=oracle.requests_failed,
                requests_partial=oracle.requests_partial,
                requests_aborted=self._num_aborted,
                requests_replaced=self._num_replaced,
                weights_changed=self._num_weights_changed,
                rows_rescued=stats.rows_rescued if stats else 0,
            )

    def _first_step_decides_keys(self) -> None:
        """A lone prompt with every key: what each key is, is decided before any of them is left out."""
        self._stage.submit(self._source.named("first", SimRequest("first", tuple(self._source.tokens(4)))))
        step = None
        while step is None:  # the schedule may have taken the prompt back
            step = self._stage.step()
        self._stage.build(step)

    def _submit_some(self) -> None:
        if self._source.num_made >= self._config.num_requests or self._rng.random() < 0.4:
            return
        for request in self._source.burst(self._live_ids()):
            self._stage.submit(request)

    def _live_ids(self) -> list[str]:
        scheduler = self._stage.engine.scheduler
        return [*scheduler.waiting, *scheduler.running]

    def _replace_some(self) -> None:
        scheduler = self._stage.engine.scheduler
        if self._rng.random() >= self._config.likelihoods.replaced or not isinstance(scheduler, SimScheduler):
            return
        live = self._live_ids()
        if live:
            self._num_replaced += scheduler.replace(self._source.replacement(self._rng.choice(live)))

    def _change_weights(self) -> None:
        rng, scheduler = self._rng, self._stage.engine.scheduler
        if not self._config.likelihoods.weights_changed or rng.random() >= self._config.likelihoods.weights_changed:
            return
        if rng.random() < 0.3:
            self._change_under_way = True
            return
        forgets = rng.random() < self._config.likelihoods.hashes_forgotten
        if forgets and self._resets_left and isinstance(scheduler, SimScheduler):
            self._resets_left -= 1
            scheduler.reset_prefix_cache()
        for adapter_id in self._new_weights():
            self._stage.engine.change_weights(adapter_id)

    def _new_weights(self) -> tuple[int | None, ...]:
        self._num_weights_changed += 1
        adapters = tuple(adapter_of(salt) for salt in SALTS)
        return self._rng.choice(((None,), adapters, (*adapters, None)))

    def _abort_some(self) -> None:
        if self._rng.random() >= self._config.likelihoods.abort_between:
            return
        live = self._live_ids()
        if not live:
            return
        req_id = self._rng.choice(live)
        self._num_aborted += self._stage.abort(req_id)
        may_submit = self._source.num_made < self._config.num_requests
        if may_submit and self._rng.random() < self._config.likelihoods.id_reused:
            # One step will report the end of the old life and the start of the new one.
            request, *_ = self._source.burst(self._live_ids())
            self._stage.submit(self._source.named(req_id, request))

    def _consume_due_steps(self) -> None:
        stage, rng = self._stage, self._rng
        waiting = list(stage.unconsumed)
        rng.shuffle(waiting)
        for step in waiting:
            if self._due[step.step_id] <= self.num_steps:
                self._consume(step)
        while len(stage.unconsumed) >= self._config.stage.staging_depth:
            self._consume(rng.choice(stage.unconsumed))

    def _consume(self, step: SavedStep) -> None:
        rng, likelihoods = self._rng, self._config.likelihoods
        choice = rng.random()
        if choice < likelihoods.discarded:
            self._stage.discard(step)
        elif choice < likelihoods.discarded + likelihoods.partly_asked:
            self._stage.build(step, tuple(rng.sample(step.req_ids, rng.randint(0, len(step.req_ids)))))
        else:
            self._stage.build(step)

    def _acknowledged(self, built: BuiltStep) -> Collection[str]:
        return [req_id for req_id in built.outputs or () if self._rng.random() < self._config.likelihoods.acknowledged]

    def _step(self) -> None:
        emitted = frozenset(
            key.name for key in self._config.keys if self._rng.random() < self._config.likelihoods.key_emitted
        )
        step = self._stage.step(emitted=emitted, faults=self._faults)
        if step is not None:
            self._due[step.step_id] = self.num_steps + self._rng.randint(0, self._config.max_steps_late)
        self.num_steps += 1

    def _faults(self, schedule: SimSchedule) -> StepFaults:
        broken = self._breaks(schedule)
        if self._change_under_way:
            self._change_under_way = False
            return replace(broken, new_weights=self._new_weights())
        return broken

    def _breaks(self, schedule: SimSchedule) -> StepFaults:
        rng, likelihoods = self._rng, self._config.likelihoods
        if not schedule.runs:
            return NO_FAULTS
        if rng.random() < likelihoods.forward_lost:
            what_then = rng.choice((LostForward.ABORTED, LostForward.ABORTED, LostForward.RETRIED))
            if what_then is LostForward.ABORTED:
                self._note_lost(schedule.runs)
            return StepFaults(lost_forward=what_then)
        if rng.random() < likelihoods.abort_before_forward:
            run = rng.choice(schedule.runs)
            self._note_lost([run])
            return StepFaults(abort_before_forward=frozenset({run.req_id}))
        return NO_FAULTS

    def _note_lost(self, runs: Sequence[ScheduledRun]) -> None:
        self._num_aborted += len(runs)
        self._source.want_again(run.track.request for run in runs)
