# SPDX-License-Identifier: Apache-2.0
"""The consumer's half of the tables: takes a saved step out once, and settles what was and was not delivered."""

from __future__ import annotations

from omni_core.prefix_cache.buffers import HostBuffer, HostBufferPool
from omni_core.prefix_cache.delivery import BatchRun, Joined
from omni_core.prefix_cache.owed import OwedRows
from omni_core.prefix_cache.planner import ReadPlanner
from omni_core.prefix_cache.requests import RequestTable
from omni_core.prefix_cache.staging import StagingBufferPool
from omni_core.prefix_cache.state import CacheState
from omni_core.prefix_cache.step_context import StepContext


class StepSettlement:
    """Ends consumed steps: pins and staging are returned, undelivered rows stay owed to their requests."""

    def __init__(
        self,
        state: CacheState,
        requests: RequestTable,
        planner: ReadPlanner,
        staging: StagingBufferPool,
        buffers: HostBufferPool,
    ) -> None:
        self._state = state
        self._requests = requests
        self._planner = planner
        self._staging = staging
        self._buffers = buffers
        self.rows_delivered = 0
        """Token positions delivered so far."""
        self.rows_from_hits = 0
        """Of those, positions delivered from stored rows."""

    def settle(self, context: StepContext, joined: Joined) -> list[HostBuffer]:
        """End a consumed step; returns the buffers its served requests' rows lie in. No lock held."""
        served = joined.served
        kept: list[HostBuffer] = []
        undelivered: list[BatchRun] = []
        if len(served) < len(context.req_ids):
            undelivered = context.runs(tuple(req_id for req_id in context.req_ids if req_id not in served))
        with self._state.lock:
            for read in context.reads:
                if not served.keys().isdisjoint(read.spans):
                    kept.extend(read.take_buffers())
            unused = self.end_step(context)
            self.rows_delivered += joined.rows_computed + joined.rows_from_hits
            self.rows_from_hits += joined.rows_from_hits
            self._requests.missing.delivered(served)
            for run in undelivered:
                self.owe(context, run)
            self._state.leave_pages()
        self._buffers.give_back(unused)
        return kept

    def owe(self, context: StepContext, run: BatchRun) -> None:
        """The step's rows of this request were not delivered. State lock held."""
        if run.req_id in context.failed:
            return
        serial = int(context.serials[run.in_batch])
        stored = context.read_of(run.req_id)
        if stored is not None:
            self._requests.owe(run.req_id, serial, stored.owed_rows(run.req_id))
            if stored is context.owed_read:
                self._requests.missing.back_off(run.req_id)
        rows = slice(run.first, run.last)
        owed = OwedRows(context.positions[rows], context.slots[rows], context.task.write_id)
        self._requests.owe(run.req_id, serial, owed)

    def end_step(self, context: StepContext) -> list[HostBuffer]:
        """Release a step's reads and its hold on staging. State lock held."""
        unused: list[HostBuffer] = []
        for read in context.reads:
            unused.extend(self._planner.end(read))
        self._staging.release(context.staging_slot, context.holder)
        self._state.progress.notify_all()
        return unused
