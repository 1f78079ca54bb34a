# SPDX-License-Identifier: Apache-2.0
"""The consumer's half of the tables: takes a saved step out once, and settles what was and was not delivered."""

from __future__ import annotations

import numpy as np

from omni_core.prefix_cache.acknowledgement import DeliveryCounts, HandedOver, UnacknowledgedRows
from omni_core.prefix_cache.buffers import HostBuffer, HostBufferPool
from omni_core.prefix_cache.config import Delivery
from omni_core.prefix_cache.delivery import BatchRun, Joined
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
        delivery: Delivery,
    ) -> None:
        self._state = state
        self._requests = requests
        self._planner = planner
        self._staging = staging
        self._buffers = buffers
        self._delivery = delivery
        self.counts = DeliveryCounts()

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
            if self._delivery is Delivery.ON_MATERIALIZE:
                self.counts.rows += joined.rows_computed + joined.rows_from_hits
                self.counts.rows_from_hits += joined.rows_from_hits
                self._requests.missing.delivered(served)
            for run in undelivered:
                self.owe(context, run)
            self._state.leave_pages()
        self._buffers.give_back(unused)
        return kept

    def hand_over(self, context: StepContext, joined: Joined) -> UnacknowledgedRows | None:
        """What the consumer has to acknowledge of a step about to be returned; `None` without `TWO_PHASE`."""
        if self._delivery is not Delivery.TWO_PHASE:
            return None
        handed_over = {}
        for run in context.runs(tuple(joined.served)):
            ranges = joined.served[run.req_id].ranges
            positions = np.concatenate([np.arange(*each, dtype=np.int64) for each in (*ranges, (0, 0))])
            owed = context.owed_read
            handed_over[run.req_id] = HandedOver(
                serial=int(context.serials[run.in_batch]),
                positions=positions,
                num_from_hits=len(positions) - run.num_rows,
                carried_owed=owed is not None and run.req_id in owed.spans,
            )
        return UnacknowledgedRows(context.label, self._state, self._requests, self.counts, handed_over)

    def owe(self, context: StepContext, run: BatchRun) -> None:
        """The step's rows of this request were not delivered. State lock held."""
        if run.req_id in context.failed:
            return
        serial = int(context.serials[run.in_batch])
        stored = context.read_of(run.req_id)
        if stored is not None:
            self._requests.owe(run.req_id, serial, stored.spans[run.req_id].positions)
            if stored is context.owed_read and self._requests.serial(run.req_id) == serial:
                self._requests.missing.back_off(run.req_id)
        self._requests.owe(run.req_id, serial, context.positions[run.first : run.last])

    def end_step(self, context: StepContext) -> list[HostBuffer]:
        """Release a step's reads and its hold on staging. State lock held."""
        unused: list[HostBuffer] = []
        for read in context.reads:
            unused.extend(self._planner.end(read))
        self._staging.release(context.staging_slot, context.holder)
        self._state.progress.notify_all()
        return unused
