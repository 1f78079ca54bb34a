# SPDX-License-Identifier: Apache-2.0
"""Forgets everything at one moment: rows, requests, open steps, queued writes, and a failure if there was one."""

from __future__ import annotations

from omni_core.prefix_cache.buffers import HostBuffer
from omni_core.prefix_cache.config import PrefixCacheConfig
from omni_core.prefix_cache.controller import OmniPrefixCacheController
from omni_core.prefix_cache.errors import CacheClosedError, JoinTimeoutError
from omni_core.prefix_cache.requests import RequestTable
from omni_core.prefix_cache.settlement import StepSettlement
from omni_core.prefix_cache.slot_table import SlotTable
from omni_core.prefix_cache.state import CacheState
from omni_core.prefix_cache.stats import ResetReport
from omni_core.prefix_cache.step_context import OpenSteps
from omni_core.prefix_cache.step_intake import StepIntake


class CacheReset:
    """The work of `OmniPrefixCacheManager.reset`. Any thread, no lock held."""

    def __init__(
        self,
        config: PrefixCacheConfig,
        state: CacheState,
        table: SlotTable,
        requests: RequestTable,
        controller: OmniPrefixCacheController,
        intake: StepIntake,
        settlement: StepSettlement,
        steps: OpenSteps,
    ) -> None:
        self._config = config
        self._state = state
        self._table = table
        self._requests = requests
        self._controller = controller
        self._intake = intake
        self._settlement = settlement
        self._steps = steps

    def reset(self) -> ResetReport:
        """See `OmniPrefixCacheManager.reset`."""
        committer = self._controller.committer
        unused: list[HostBuffer] = []
        with self._state.lock:
            if self._state.closing:
                raise CacheClosedError("reset: the cache is closed")
            committer.pause()
            try:
                idle = self._state.progress.wait_for(lambda: not committer.writing, self._config.join_timeout_s)
                writes_dropped = committer.drop_queue() if idle else 0
                records_dropped = self._controller.deferred.drop_open() if idle else 0
            finally:
                committer.go_on()
            if self._state.closing:
                raise CacheClosedError("reset: the cache was closed meanwhile")
            if not idle:
                raise JoinTimeoutError(
                    f"reset: the write under way did not end within join_timeout_s={self._config.join_timeout_s}; "
                    f"nothing was reset: {', '.join(map(str, committer.open_tasks))}"
                )
            rows_cleared = self._table.present_rows()
            row_bytes = {key: spec.row_bytes for key, spec in self._controller.pool.specs.items()}
            failure = self._state.failure
            unused.extend(self._intake.end_unsaved_step())
            dropped = self._steps.consume_all()
            for context in dropped:
                for run in context.runs(context.req_ids):
                    self._settlement.owe(context, run)
                unused.extend(self._settlement.end_step(context))
            requests_forgotten = self._requests.forget_all()
            self._controller.prefetcher.drop_queue()
            self._table.start_all_tenancies()
            committer.forgive()
            self._state.failure = None
            self._state.epoch += 1
            self._state.wake_all()
        self._controller.buffers.give_back(unused)
        return ResetReport(
            rows_cleared=rows_cleared,
            requests_forgotten=requests_forgotten,
            steps_dropped=len(dropped),
            writes_dropped=writes_dropped,
            deferred_records_dropped=records_dropped,
            bytes_cleared=sum(rows * row_bytes[key] for key, rows in rows_cleared.items()),
            failure_cleared=None if failure is None else repr(failure),
        )
