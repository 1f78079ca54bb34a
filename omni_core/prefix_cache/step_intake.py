# SPDX-License-Identifier: Apache-2.0
"""The engine thread's half of the tables: applies a step's events, then claims its writes and plans its reads."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from omni_core.prefix_cache.buffers import HostBuffer
from omni_core.prefix_cache.committer import Committer
from omni_core.prefix_cache.deferred_records import DeferredRecords
from omni_core.prefix_cache.entrance import RequestEntrance
from omni_core.prefix_cache.event_digest import EventDigest
from omni_core.prefix_cache.events import StepLayout
from omni_core.prefix_cache.owed import Positions
from omni_core.prefix_cache.planner import ReadPlanner
from omni_core.prefix_cache.reads import ReadRequest, StepRead
from omni_core.prefix_cache.refusals import RequestRefusals
from omni_core.prefix_cache.requests import RequestTable
from omni_core.prefix_cache.slot_table import ABSENT, NO_ADAPTER, NOBODY, Slots, SlotTable
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
        deferred: DeferredRecords,
        steps: OpenSteps,
    ) -> None:
        self._table = table
        self._requests = requests
        self._refusals = refusals
        self._planner = planner
        self._committer = committer
        self._deferred = deferred
        self._steps = steps
        self._entrance = RequestEntrance(table, requests, refusals, steps)
        self._started_reads: list[StepRead] | None = None
        self._new_versions: list[int | None] = []
        self.any_step_started = False

    @property
    def step_under_way(self) -> bool:
        """A step was announced and is neither saved nor over."""
        return self._started_reads is not None

    def start_step(self, digest: EventDigest) -> None:
        """Apply a step's events: ends, tenancies, copies, then the reads of its prefix hits."""
        self.any_step_started = True
        for req_id in digest.ended:
            self._entrance.expire_drafts(req_id)
            if self._deferred.keys:
                self._deferred.force_ended(req_id, self._requests.row(req_id), self._requests.serial(req_id))
            self._requests.end(req_id)
        for request in digest.entering:
            self._entrance.expire_drafts(request.req_id, request)
        # The engine copies KV blocks in order and before the forward: a copy sees what its source held until now.
        for source, destination, num_rows in digest.copies:
            self._copy_block(source, destination, num_rows)
        self._table.start_tenancies(digest.fresh_blocks)
        self._table.set_digests(digest.known_blocks, digest.known_digests)
        for req_id, block_id, block_digest in digest.private_blocks:
            self._table.make_private(block_id, block_digest, self._requests.life(req_id))
        for request in digest.entering:
            if request.adapter_id != NO_ADAPTER or self._table.any_adapter:
                self._entrance.fill_blocks(request)
        for error in digest.refused:
            self._refusals.refuse(error)
        for req_id, block_ids in digest.extended:
            self._requests.extend(req_id, block_ids, self._table.last_id)
        if self._requests.adapters:
            for req_id, block_ids in digest.extended:
                self._table.set_adapter(block_ids, self._requests.adapters.get(req_id, NO_ADAPTER))
        reads = [read for request in digest.entering if (read := self._entrance.enter(request)) is not None]
        self._started_reads = [self._planner.plan("the step under way", reads)] if reads else []

    def expire_version(self, adapter_id: int | None) -> bool:
        """Rows of every step announced until now are of weights that are gone: absent for steps announced from now on.

        Of a step under way nobody can tell which weights its forward ran with: it plans and claims as it would have,
        and its rows go with the others once it is saved, or is over.

        Args:
            adapter_id: rows in this adapter's blocks; `None`: all.

        Returns:
            Whether that is new: the step under way was not to take these rows with it already.
        """
        if not self.step_under_way:
            self._table.expire_version(adapter_id)
            return True
        if adapter_id in self._new_versions or None in self._new_versions:
            return False
        self._new_versions.append(adapter_id)
        return True

    def _expire_versions(self) -> None:
        for adapter_id in self._new_versions:
            self._table.expire_version(adapter_id)
        self._new_versions.clear()

    def _copy_block(self, source: int, destination: int, num_rows: int) -> None:
        offsets = np.arange(num_rows, dtype=np.int64)
        source_slots = source * self._table.block_size + offsets
        destination_slots = destination * self._table.block_size + offsets
        sources = {}
        # Of a block that is private to one request nobody can tell what it holds under its hash: nothing is copied.
        readable = self._table.private_to(source) == NOBODY
        for key in self._table.keys if readable else ():
            present = self._table.present_ids(key, source_slots) != ABSENT
            if present.any():
                sources[key] = PoolRows(key, source_slots[present], destination_slots[present])
        self._force_sources(sources.values(), f"copy of block {source} to block {destination}")
        self._table.start_tenancies(np.array([destination], np.int64))
        self._table.copy_adapter(source, destination)
        if num_rows == self._table.block_size:
            self._table.copy_digest(source, destination)
        write_id = self._table.next_write_id()
        for key, rows in sources.items():
            self._table.claim((key,), rows.destination_slots, write_id)
        task = WriteTask(f"copy of block {source} to block {destination}", write_id, destination_slots)
        task.copy_slots = tuple(sources.values())
        self._committer.enqueue(task)

    def _force_sources(self, sources: Iterable[PoolRows], label: str) -> None:
        """Rows on the device that the copy reads, or whose late landing would overwrite what it writes, go first."""
        for rows in sources:
            if rows.key in self._deferred.keys:
                for slots in (rows.source_slots, rows.destination_slots):
                    self._deferred.force_claims(self._table.claims(rows.key, slots), label)

    def end_unsaved_step(self) -> list[HostBuffer]:
        """End the reads of a step that was started and not saved; its hits stay owed."""
        unused: list[HostBuffer] = []
        for read in self._started_reads or ():
            unused.extend(self._planner.end(read))
            for req_id, span in read.spans.items():
                self._requests.owe(req_id, self._requests.serial(req_id), span.positions)
        self._started_reads = None
        if self._new_versions:
            self._expire_versions()
        return unused

    def save_step(
        self,
        layout: StepLayout,
        record: StepRecord,
        slot: StagingSlot,
        *,
        all_stored: bool,
        hidden_needed: bool,
        carry_owed: bool,
    ) -> int:
        """Claim the step's writes, plan again what they touch, promise its rows. `all_stored`: no slot is -1."""
        reads = self._started_reads or []
        self._started_reads = None
        starts, positions = layout.starts.astype(np.int64), layout.positions.astype(np.int64)
        slots = layout.slots.astype(np.int64)
        rows = self._requests.rows(layout.req_ids)
        progress = self._requests.progress
        serials = progress.serials(rows)
        if len(positions) == len(layout.req_ids):  # a decode step: one row each
            firsts, ends = positions, positions + 1
        else:
            firsts, ends = positions[starts[:-1]], positions[starts[1:] - 1] + 1
        # Rows of rejected drafts, and of replaced content, may lie there under keys this step does not bring.
        rewritten = progress.rewritten(rows, firsts, starts, positions)
        if rewritten is not None:
            self._table.expire(slots[rewritten & (slots >= 0)])
            for index, left in progress.left_behind(rows, ends):
                self._entrance.expire_rows(layout.req_ids[index], np.arange(left.start, left.stop, dtype=np.int64))
        step_id = self._steps.next_id()
        task = WriteTask(f"write of step {step_id}", self._table.next_write_id(), slots)
        task.staged = record.stored
        task.staging_slot = slot
        task.copy_done = record.copy_done
        stored_slots = slots if all_stored else slots[slots >= 0]
        self._table.claim(record.immediate_keys, stored_slots, task.write_id)
        if self._deferred.keys:
            self._defer_rows(f"step {step_id}", task, record, layout.req_ids, rows, serials, stored_slots)
        for read in reads:
            read.step_label = f"step {step_id}"
            self._planner.plan_again(read, stored_slots)
            for req_id in read.spans.keys() - set(layout.req_ids):  # started, but scheduled in a later step
                self._requests.owe(req_id, self._requests.serial(req_id), read.spans[req_id].positions)
        context = StepContext(
            step_id,
            layout.req_ids,
            serials,
            starts,
            positions,
            slots,
            record,
            slot,
            task,
            reads,
        )
        slot.hold(context.holder)
        context.failed = self._refusals.unexpected(context.label, context.req_ids, rows, firsts)
        context.promised_before = progress.promised_before(rows, firsts, ends)
        draft_floors = ends
        if layout.num_draft_tokens is not None and layout.num_draft_tokens.any():
            context.num_draft_tokens = layout.num_draft_tokens.astype(np.int64)
            draft_floors = ends - context.num_draft_tokens
        due = self._requests.missing.due() if carry_owed else []
        if due:
            self._plan_owed(context, due, firsts, ends)
        if hidden_needed:
            for read in context.reads:
                context.failed.update(self._refusals.absent_hidden(context.label, read, context.req_ids))
        progress.promise(rows, ends, draft_floors)
        self._steps.add(context)
        self._committer.enqueue(task)
        if record.deferred is not None:
            self._deferred.relieve_pressure(record.deferred.nbytes)
        if self._new_versions:
            self._expire_versions()
        return step_id

    def _defer_rows(
        self,
        step: str,
        task: WriteTask,
        record: StepRecord,
        req_ids: tuple[str, ...],
        rows: npt.NDArray[np.int64],
        serials: npt.NDArray[np.int64],
        stored_slots: Slots,
    ) -> None:
        """Claim the rows that wait on the device; where some do not, older ones of their keys must not land later."""
        if not self._deferred.keys.isdisjoint(record.immediate_keys):
            self._deferred.force_all(f"rows of {step} that cannot wait")
        if record.deferred is not None:
            record.deferred.register(step, task.write_id, task.slots, req_ids)
            self._table.claim(record.deferred.keys, stored_slots, task.write_id)
            self._deferred.add(record.deferred, rows, serials)

    def _plan_owed(self, context: StepContext, due: list[str], firsts: Positions, ends: Positions) -> None:
        """Let the step carry rows of earlier ones that were not delivered, as far as it computes or has computed them.

        Rows that the step itself computes again are read back like the others: its writes are claimed already.
        """
        requests = []
        for run in context.runs(tuple(due)):
            if run.req_id in context.failed or context.read_of(run.req_id) is not None:
                continue
            first, end = int(firsts[run.in_batch]), int(ends[run.in_batch])
            positions = self._requests.missing.take_below(run.req_id, end)
            if len(positions):
                slots = self._table.still_held(*self._requests.slots(run.req_id, positions))
                requests.append(ReadRequest(run.req_id, positions, slots, end - first))
        if requests:
            context.owed_read = self._planner.plan(context.label, requests)
            context.reads.append(context.owed_read)
