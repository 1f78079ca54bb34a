# SPDX-License-Identifier: Apache-2.0
"""The engine thread's half of the tables: applies a step's events, then claims its writes and plans its reads."""

from __future__ import annotations

import numpy as np

from omni_core.prefix_cache.buffers import HostBuffer
from omni_core.prefix_cache.committer import Committer
from omni_core.prefix_cache.errors import LifecycleUnsupportedError
from omni_core.prefix_cache.event_digest import EventDigest
from omni_core.prefix_cache.events import StepLayout
from omni_core.prefix_cache.planner import ReadPlanner
from omni_core.prefix_cache.reads import ReadRequest, StepRead
from omni_core.prefix_cache.refusals import RequestRefusals
from omni_core.prefix_cache.requests import RequestTable
from omni_core.prefix_cache.slot_table import ABSENT, SlotTable
from omni_core.prefix_cache.staging import StagingSlot
from omni_core.prefix_cache.step_context import OpenSteps, StepContext
from omni_core.prefix_cache.step_record import StepRecord
from omni_core.prefix_cache.task import PoolRows, WriteTask


class StepIntake:
    """Knows the step under way. Every method needs the state lock; none blocks, copies or touches a tensor."""

    def __init__(
        self,
        table: SlotTable,
        requests: RequestTable,
        refusals: RequestRefusals,
        planner: ReadPlanner,
        committer: Committer,
        steps: OpenSteps,
    ) -> None:
        self._table = table
        self._requests = requests
        self._refusals = refusals
        self._planner = planner
        self._committer = committer
        self._steps = steps
        self._started_reads: list[StepRead] | None = None
        self.any_step_started = False

    @property
    def step_under_way(self) -> bool:
        """A step was announced and is neither saved nor over."""
        return self._started_reads is not None

    def start_step(self, digest: EventDigest) -> None:
        """Apply a step's events: ends, tenancies, copies, then the reads of its prefix hits."""
        self.any_step_started = True
        for req_id in digest.ended:
            self._requests.end(req_id)
        # The engine copies KV blocks in order and before the forward: a copy sees what its source held until now.
        for source, destination, num_rows in digest.copies:
            self._copy_block(source, destination, num_rows)
        self._table.start_tenancies(digest.fresh_blocks)
        for error in digest.refused:
            self._refusals.refuse(error)
        reads = []
        for request in digest.started:
            if request.req_id in self._requests:
                self._refusals.refuse(
                    LifecycleUnsupportedError(
                        request.req_id,
                        "started again while live; continuations and resumed requests are not served by this version",
                    )
                )
                continue
            hit = len(request.hit_slots)
            self._requests.start(request.req_id, hit)
            if hit:
                positions = np.arange(hit, dtype=np.int64)
                reads.append(ReadRequest(request.req_id, positions, request.hit_slots, request.num_scheduled_tokens))
        self._started_reads = [self._planner.plan("the step under way", reads)] if reads else []

    def _copy_block(self, source: int, destination: int, num_rows: int) -> None:
        offsets = np.arange(num_rows, dtype=np.int64)
        source_slots = source * self._table.block_size + offsets
        destination_slots = destination * self._table.block_size + offsets
        sources = {}
        for key in self._table.keys:
            present = self._table.present_ids(key, source_slots) != ABSENT
            if present.any():
                sources[key] = PoolRows(key, source_slots[present], destination_slots[present])
        self._table.start_tenancies(np.array([destination], np.int64))
        write_id = self._table.next_write_id()
        for key, rows in sources.items():
            self._table.claim((key,), rows.destination_slots, write_id)
        task = WriteTask(f"copy of block {source} to block {destination}", write_id, destination_slots)
        task.copy_slots = tuple(sources.values())
        self._committer.enqueue(task)

    def end_unsaved_step(self) -> list[HostBuffer]:
        """End the reads of a step that was started and not saved; its hits stay owed."""
        unused: list[HostBuffer] = []
        for read in self._started_reads or ():
            unused.extend(self._planner.end(read))
            for req_id in read.spans:
                serial = self._requests.serial(req_id)
                self._requests.owe(req_id, serial, read.owed_rows(req_id))
        self._started_reads = None
        return unused

    def save_step(
        self, layout: StepLayout, record: StepRecord, slot: StagingSlot, *, hidden_needed: bool, carry_owed: bool
    ) -> int:
        """Claim the step's writes, plan again what they touch, promise its rows."""
        reads = self._started_reads or []
        self._started_reads = None
        starts, positions = layout.starts.astype(np.int64), layout.positions.astype(np.int64)
        slots = layout.slots.astype(np.int64)
        rows = self._requests.rows(layout.req_ids)
        firsts = positions[starts[:-1]]
        step_id = self._steps.next_id()
        task = WriteTask(f"write of step {step_id}", self._table.next_write_id(), slots)
        task.staged = record.stored
        task.staging_slot = slot
        task.copy_done = record.copy_done
        stored_slots = slots if slots.min() >= 0 else slots[slots >= 0]
        self._table.claim(tuple(staged.key for staged in task.staged), stored_slots, task.write_id)
        for read in reads:
            read.step_label = f"step {step_id}"
            self._planner.plan_again(read, stored_slots)
            for req_id in read.spans.keys() - set(layout.req_ids):  # started, but scheduled in a later step
                self._requests.owe(req_id, self._requests.serial(req_id), read.owed_rows(req_id))
        context = StepContext(
            step_id,
            layout.req_ids,
            self._requests.serials(rows),
            starts,
            positions,
            slots,
            record,
            slot,
            task,
            reads,
        )
        slot.hold(context.holder)
        context.failed.update(self._refusals.unexpected(context.label, context.req_ids, rows, firsts))
        due = self._requests.missing.due() if carry_owed else []
        if due:
            self._plan_owed(context, due)
        if hidden_needed:
            for read in context.reads:
                context.failed.update(self._refusals.absent_hidden(context.label, read))
        self._requests.promise(rows, positions[starts[1:] - 1] + 1)
        self._steps.add(context)
        self._committer.enqueue(task)
        return step_id

    def _plan_owed(self, context: StepContext, due: list[str]) -> None:
        """Let the step carry rows of earlier ones that were not delivered."""
        requests = []
        for run in context.runs(tuple(due)):
            if run.req_id in context.failed or context.read_of(run.req_id) is not None:
                continue
            chunks = self._requests.missing.take(run.req_id)
            positions = np.concatenate([chunk.positions for chunk in chunks])
            slots = np.concatenate([self._table.still_held(chunk.slots, chunk.since) for chunk in chunks])
            order = np.argsort(positions, kind="stable")
            requests.append(ReadRequest(run.req_id, positions[order], slots[order], run.num_rows))
        if requests:
            context.owed_read = self._planner.plan(context.label, requests)
            context.reads.append(context.owed_read)
