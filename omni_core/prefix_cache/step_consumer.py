# SPDX-License-Identifier: Apache-2.0
"""How a saved step is consumed: waited for, joined with stored rows, and settled, whatever became of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from omni_core.prefix_cache.acknowledgement import UnacknowledgedRows
from omni_core.prefix_cache.buffers import HostBuffer
from omni_core.prefix_cache.config import PrefixCacheConfig
from omni_core.prefix_cache.controller import OmniPrefixCacheController
from omni_core.prefix_cache.delivery import Joined, copy_step, join_step
from omni_core.prefix_cache.errors import (
    CacheClosedError,
    CacheFailedError,
    JoinTimeoutError,
    OmniPrefixCacheError,
    ReadFailedError,
    RequestError,
)
from omni_core.prefix_cache.outputs import StageCacheOutputs
from omni_core.prefix_cache.reads import StepRead
from omni_core.prefix_cache.settlement import StepSettlement
from omni_core.prefix_cache.state import CacheState
from omni_core.prefix_cache.step_context import OpenSteps, StepContext, StepEnd
from omni_core.runtime import Runtime


class StepConsumer:
    """The work of `OmniPrefixCacheManager.materialize` and `discard_step`. Any thread, no lock held."""

    def __init__(
        self,
        config: PrefixCacheConfig,
        state: CacheState,
        controller: OmniPrefixCacheController,
        steps: OpenSteps,
        settlement: StepSettlement,
        runtime: Runtime,
    ) -> None:
        self._config = config
        self._state = state
        self._controller = controller
        self._steps = steps
        self._settlement = settlement
        self._runtime = runtime
        self.steps_materialized = 0
        """How many were consumed so, guarded by the state lock."""
        self.steps_discarded = 0
        """The same."""

    def materialize(
        self, step_id: int, req_ids: Sequence[str], sampled_counts: Mapping[str, int] | None
    ) -> StageCacheOutputs:
        """See `OmniPrefixCacheManager.materialize`."""
        asked = tuple(dict.fromkeys(req_ids))
        what = f"materialize of step {step_id}"
        context: StepContext | None = None
        joined = Joined({}, [])
        kept: list[HostBuffer] = []
        unacknowledged: UnacknowledgedRows | None = None
        try:
            with self._state.lock:
                context = self._consume(step_id, StepEnd.MATERIALIZED, asked, sampled_counts, what)
                problem = self._await_step(context, what)
                failed = dict(context.failed)
                for read in context.reads:
                    if read.pending_batches or read.error is not None:
                        failed.update(self._read_failures(context, read))
            if problem is None:
                served = tuple(req_id for req_id in asked if req_id not in failed) if failed else asked
                joined = self._join(context, served)
                unacknowledged = self._settlement.hand_over(context, joined)
        finally:
            if context is not None:
                kept = self._settlement.settle(context, joined)
        if problem is not None:
            raise problem
        buffers = joined.buffers + kept
        give_back = self._controller.buffers.give_back
        shown = {req_id: failed[req_id] for req_id in asked if req_id in failed} if failed else {}
        if unacknowledged is None:
            return StageCacheOutputs(step_id, joined.served, shown, lambda: give_back(buffers))
        give_up = unacknowledged.give_up

        def release() -> None:
            give_up()
            give_back(buffers)

        return StageCacheOutputs(step_id, joined.served, shown, release, unacknowledged.acknowledge)

    def discard(self, step_id: int, sampled_counts: Mapping[str, int] | None) -> None:
        """See `OmniPrefixCacheManager.discard_step`."""
        what = f"discard of step {step_id}"
        with self._state.lock:
            context = self._consume(step_id, StepEnd.DISCARDED, (), sampled_counts, what)
            problem = self._state.problem(what)
        self._settlement.settle(context, Joined({}, []))
        if problem is not None:
            raise problem

    def _consume(
        self,
        step_id: int,
        end: StepEnd,
        asked: tuple[str, ...],
        sampled_counts: Mapping[str, int] | None,
        what: str,
    ) -> StepContext:
        """Take a step out of the open ones, if the call is right. State lock held."""
        if self._state.closing:
            raise CacheClosedError(f"{what}: the cache is closed")
        context = self._steps.get(step_id)
        context.check_requests(asked)
        context.num_valid_rows = context.count_valid_rows(sampled_counts)
        if end is StepEnd.MATERIALIZED:
            self.steps_materialized += 1
        else:
            self.steps_discarded += 1
        self._state.enter_pages()
        return self._steps.consume(step_id, end)

    def _await_step(self, context: StepContext, what: str) -> OmniPrefixCacheError | None:
        """Wait for a step's copy and reads; returns why its rows cannot be had. State lock held, free while waiting."""
        epoch = self._state.epoch
        task, deferred = context.task, context.record.deferred
        if deferred is not None and self._state.usable:
            self._controller.deferred.force_through(deferred.write_id, what)
        self._state.wait(
            lambda: (
                task.host_ready
                and (deferred is None or deferred.host_ready)
                and all(read.complete for read in context.reads)
            ),
            self._config.join_timeout_s,
        )
        problem = self._state.problem(what)
        if problem is None and self._state.epoch != epoch:
            return CacheFailedError(f"{what}: the cache was reset while it waited; the step's rows are gone")
        late = next((write for write in (task, deferred) if write is not None and not write.host_ready), None)
        if problem is None and late is not None:
            return JoinTimeoutError(
                f"{what}: its copy did not complete within join_timeout_s={self._config.join_timeout_s}: {late}; its "
                f"rows stay owed to their requests; open: {self._controller.under_way(self._steps)}"
            )
        return problem

    def _read_failures(self, context: StepContext, read: StepRead) -> dict[str, RequestError]:
        cause = read.error or f"not gathered within join_timeout_s={self._config.join_timeout_s}"
        return {
            req_id: ReadFailedError(req_id, f"{context.label}: stored rows could not be read ({cause}); they stay owed")
            for req_id in read.spans
            if req_id not in context.failed
        }

    def _join(self, context: StepContext, req_ids: tuple[str, ...]) -> Joined:
        self._runtime.checkpoint("materialize.join")
        if context.delivers_all_it_computed(req_ids):
            with torch.inference_mode(False):
                return copy_step(context.record, req_ids, context.starts, context.positions, self._controller.buffers)
        runs = context.runs(req_ids)
        reads = context.reads_of(req_ids)
        with torch.inference_mode(False):
            return join_step(context.record, runs, reads, self._controller.pool.specs, self._controller.buffers)
