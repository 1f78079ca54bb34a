# SPDX-License-Identifier: Apache-2.0
"""The cache's public face: keeps the tables that mirror the engine's KV cache, and plans what is read and written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from omni_core.backend import DeviceBackend
from omni_core.prefix_cache.block_pool import RowSpec
from omni_core.prefix_cache.buffers import HostBuffer
from omni_core.prefix_cache.config import PrefixCacheConfig
from omni_core.prefix_cache.controller import OmniPrefixCacheController
from omni_core.prefix_cache.delivery import BatchRun, Joined, join_step
from omni_core.prefix_cache.errors import (
    CacheClosedError,
    FeatureUnsupportedError,
    JoinTimeoutError,
    LifecycleUnsupportedError,
    OmniPrefixCacheStagingTimeoutError,
    ReadFailedError,
    RequestError,
    StepOrderError,
    StepTooLargeError,
)
from omni_core.prefix_cache.event_digest import EventDigest, digest_events
from omni_core.prefix_cache.events import StepEvents, StepLayout
from omni_core.prefix_cache.outputs import PartialRequest, RequestRows, StageCacheOutputs
from omni_core.prefix_cache.planner import ReadPlanner
from omni_core.prefix_cache.policy import ModelCachePolicy
from omni_core.prefix_cache.reads import ReadRequest, StepRead
from omni_core.prefix_cache.refusals import RequestRefusals
from omni_core.prefix_cache.requests import RequestTable
from omni_core.prefix_cache.slot_table import ABSENT, SlotTable
from omni_core.prefix_cache.staging import StagingSlot
from omni_core.prefix_cache.state import CacheState
from omni_core.prefix_cache.stats import CacheStats, ResetReport
from omni_core.prefix_cache.step_context import OpenSteps, StepContext, StepEnd
from omni_core.prefix_cache.step_inputs import OutputClassifier, StepInputs, check_layout
from omni_core.prefix_cache.step_record import StepRecord, check_devices, step_nbytes
from omni_core.prefix_cache.task import PoolRows, WriteSchedule, WriteTask
from omni_core.runtime import Runtime

_CLAIM_HOLDER = "save_outputs"
"""The name under which `save_outputs` holds a staging slot until the step and its write do."""


class OmniPrefixCacheManager:
    """Mirrors the engine's KV blocks and gives back whole-prompt rows.

    Calls of one step, in order: `new_step_starts` and `save_outputs` on the engine thread, then exactly one of
    `materialize` and `discard_step` on any thread, also while later steps run. All other methods: any thread.
    """

    def __init__(
        self,
        config: PrefixCacheConfig,
        backend: DeviceBackend,
        layout_source: Callable[[], StepLayout],
        *,
        runtime: Runtime,
        device: torch.device,
    ) -> None:
        """Allocate staging and start the helper threads. Slow; when the engine's KV cache is made.

        Args:
            config: geometry and limits.
            backend: of the device the step's tensors lie on.
            layout_source: called once inside each `save_outputs`, when the runner has prepared its batch.
            runtime: makes every thread, lock and condition; the one the backend was made with.
            device: where the step's tensors lie.

        Raises:
            MemoryError: staging was refused by the device.
        """
        self.config = config
        self._backend = backend
        self._layout_source = layout_source
        self._runtime = runtime
        self._state = CacheState(runtime)
        self._table = SlotTable(config.num_blocks, config.block_size)
        self._requests = RequestTable(config.max_partial_reports)
        self._controller = OmniPrefixCacheController(config, backend, self._state, self._table, runtime, device)
        self._planner = ReadPlanner(self._state, self._table, self._controller.prefetcher, self._controller.live_reads)
        self._refusals = RequestRefusals(self._requests)
        self._policy = ModelCachePolicy()
        self._classifier = OutputClassifier(config, self._policy)
        self._steps = OpenSteps()
        self._started_reads: list[StepRead] | None = None
        self._any_step_started = False
        self._steps_saved = self._steps_materialized = self._steps_discarded = 0
        self._rows_delivered = self._rows_from_hits = 0

    def register_policy(self, policy: ModelCachePolicy) -> None:
        """Take the model's declaration. Once, before the first step.

        Raises:
            FeatureUnsupportedError: the policy declares deferred keys.
            StepOrderError: a step has already started.
        """
        if policy.deferred_keys:
            raise FeatureUnsupportedError(
                f"deferred_keys={sorted(policy.deferred_keys)}: {WriteSchedule.JOIN_ON_FINISH.name} writes are not "
                "supported by this version; declare them in token_keys, or leave them undeclared"
            )
        with self._state.lock:
            if self._any_step_started:
                raise StepOrderError("register_policy was called after the first step; register it at load")
            self._policy = policy
            self._classifier = OutputClassifier(self.config, policy)

    # -- engine thread ------------------------------------------------------------------------------------------------

    def new_step_starts(self, events: StepEvents) -> None:
        """Hear what is scheduled, before the forward. Engine thread; never blocks.

        Applies all tenancy changes, then plans and pins the reads of prefix hits, whose gathering starts at once. A
        step that was started before and never saved ends here; its hits stay owed to their requests.

        Raises:
            SlotOutOfRangeError: a block id lies outside the KV cache; nothing was changed.
            CacheFailedError, CacheClosedError: see `CacheState.check_usable`.
        """
        digest = digest_events(events, self._table)
        unused: list[HostBuffer] = []
        with self._state.lock:
            self._any_step_started = True
            unused.extend(self._end_unsaved_step())
            if self._state.usable:
                self._apply(digest)
        self._controller.buffers.give_back(unused)
        self._check_usable("new_step_starts")

    def save_outputs(
        self,
        hidden: torch.Tensor | None,
        mm_outputs: Mapping[str, Any],
        *,
        num_tokens_unpadded: int,
        num_tokens_padded: int,
    ) -> int:
        """Keep a step's rows. Engine thread, after the forward; its tensors may be overwritten once this returns.

        Waits only for a staging slot, at most `staging_claim_timeout_s`.

        Args:
            hidden: `(num_tokens_unpadded or num_tokens_padded, hidden_size)`, real rows first; `None` only if the
                policy keeps no hidden rows.
            mm_outputs: further outputs by name, nested mappings joined with dots. A tensor whose first dimension is
                one of the two counts has a row per token and is stored; anything else is passed on.
            num_tokens_unpadded: real rows of the step.
            num_tokens_padded: rows the graph ran at.

        Returns:
            The step id, to be consumed exactly once.

        Raises:
            StepOrderError, LayoutMismatchError, SlotOutOfRangeError, BlockSizeMismatchError, KeyShapeChangedError,
            StepTooLargeError, NoBackendForTensorError: wrong input; nothing was changed.
            OmniPrefixCacheStagingTimeoutError: unread steps hold every staging slot; names them.
            CacheFailedError, CacheClosedError: see `CacheState.check_usable`.
        """
        layout = self._layout_source()
        check_layout(layout, self.config, num_tokens_unpadded)
        inputs = self._classifier.understand(
            hidden, mm_outputs, num_tokens_unpadded, num_tokens_padded, len(layout.req_ids)
        )
        check_devices(inputs, self._backend)
        self._check_size(inputs, num_tokens_unpadded)
        slot = self._claim_staging()
        try:
            new_tables = self._prepare_keys(inputs)
            record = self._controller.record(inputs, slot)
            self._runtime.checkpoint("save_outputs.recorded")
        except BaseException:
            with self._state.lock:
                self._controller.staging.release(slot, _CLAIM_HOLDER)
                self._state.progress.notify_all()
            raise
        unused: list[HostBuffer] = []
        step_id = 0
        with self._state.lock:
            if self._state.usable:
                for key, tables in new_tables.items():
                    self._table.add_key(key, tables)
                self._classifier.confirm(inputs)
                step_id = self._commit_step(layout, record, slot)
            else:
                unused.extend(self._end_unsaved_step())
            self._controller.staging.release(slot, _CLAIM_HOLDER)
        self._controller.buffers.give_back(unused)
        if not step_id:
            self._check_usable("save_outputs")
        return step_id

    # -- any thread ---------------------------------------------------------------------------------------------------

    def materialize(
        self, step_id: int, req_ids: Sequence[str], sampled_counts: Mapping[str, int] | None = None
    ) -> StageCacheOutputs:
        """Join a step's rows for `req_ids` and consume the step. Any thread, also a late one.

        Waits for the step's copy and for its reads, at most `join_timeout_s`. Rows of requests of the step that are
        not asked for stay owed to them and come with a later step.

        Args:
            step_id: from `save_outputs`.
            req_ids: requests of the step to deliver.
            sampled_counts: accepted tokens of requests with drafts; not supported by this version.

        Returns:
            Rows of every request that could be served; the others with their error in `failed`.

        Raises:
            UnknownStepError, StepAlreadyMaterializedError, StepAlreadyDiscardedError, RequestNotInStepError,
            FeatureUnsupportedError: misuse; nothing was changed.
            JoinTimeoutError: the step's copy did not complete in time. The step is consumed, its rows stay owed.
            CacheFailedError, CacheClosedError: see `CacheState.check_usable`. The step is consumed.
        """
        if sampled_counts is not None:
            raise FeatureUnsupportedError(
                f"step {step_id}: sampled_counts was given, but draft tokens are not supported by this version"
            )
        asked = tuple(dict.fromkeys(req_ids))
        with self._state.lock:
            self._steps.get(step_id).check_requests(asked)
            context = self._steps.consume(step_id, StepEnd.MATERIALIZED)
            self._steps_materialized += 1
            self._state.wait(
                lambda: context.task.host_ready and all(read.complete for read in context.reads),
                self.config.join_timeout_s,
            )
            usable = self._state.usable
            copied = context.task.host_ready
            failed = dict(context.failed)
            for read in context.reads:
                if read.pending_batches or read.error is not None:
                    failed.update(self._read_failures(context, read))
        joined: Joined | None = None
        try:
            if usable and copied:
                joined = self._join(context, [req_id for req_id in asked if req_id not in failed])
        finally:
            kept = self._finish_step(context, {} if joined is None else joined.served)
        if joined is None:
            self._check_usable(f"materialize of step {step_id}")
            raise JoinTimeoutError(
                f"step {step_id}: its copy did not complete within join_timeout_s={self.config.join_timeout_s}: "
                f"{context.task}; its rows stay owed to their requests"
            )
        buffers = joined.buffers + kept
        give_back = self._controller.buffers.give_back
        shown = {req_id: failed[req_id] for req_id in asked if req_id in failed}
        return StageCacheOutputs(step_id, joined.served, shown, lambda: give_back(buffers))

    def discard_step(self, step_id: int) -> None:
        """Give a step's rows up and consume the step. Its rows are still stored, and owed to their requests.

        Raises:
            UnknownStepError, StepAlreadyMaterializedError, StepAlreadyDiscardedError: misuse; nothing was changed.
            CacheFailedError, CacheClosedError: see `CacheState.check_usable`. The step is consumed.
        """
        with self._state.lock:
            context = self._steps.consume(step_id, StepEnd.DISCARDED)
            self._steps_discarded += 1
        self._controller.buffers.give_back(self._finish_step(context, {}))
        self._check_usable(f"discard of step {step_id}")

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until every write queued before the call is in the pool, at most `timeout_s` (`join_timeout_s`).

        Raises:
            JoinTimeoutError: names the writes still under way.
            CacheFailedError, CacheClosedError: see `CacheState.check_usable`.
        """
        limit_s = self.config.join_timeout_s if timeout_s is None else timeout_s
        committer = self._controller.committer
        with self._state.lock:
            target = self._table.last_write_id
            landed = self._state.wait(lambda: committer.landed_upto >= target, limit_s)
            under_way = ", ".join(map(str, committer.open_tasks))
        if not landed:
            raise JoinTimeoutError(f"flush: writes did not land within {limit_s} s: {under_way}")
        self._check_usable("flush")

    def take_partial_requests(self) -> tuple[PartialRequest, ...]:
        """Ended requests with rows that were promised and never delivered, once each."""
        with self._state.lock:
            return self._requests.take_partial()

    def reset(self) -> ResetReport:
        """Forget every row, request, open step and failure. Waits for the write under way, at most `join_timeout_s`.

        Rows written before are never served again. Requests that are live have to be started again; until they end,
        they are answered with `RequestNotStartedError`.

        Raises:
            JoinTimeoutError: the write under way did not end.
            CacheClosedError: the cache is closed.
        """
        committer = self._controller.committer
        unused: list[HostBuffer] = []
        with self._state.lock:
            if self._state.closing:
                raise CacheClosedError("reset: the cache is closed")
            writes_dropped = committer.drop_queue()
            idle = self._state.progress.wait_for(lambda: committer.idle, self.config.join_timeout_s)
            if not idle:
                raise JoinTimeoutError(
                    f"reset: the write under way did not end within join_timeout_s={self.config.join_timeout_s}: "
                    f"{', '.join(map(str, committer.open_tasks))}"
                )
            rows_cleared = self._table.present_rows()
            failure = self._state.failure
            requests_forgotten = self._requests.forget_all()
            unused.extend(self._end_unsaved_step())
            dropped = self._steps.consume_all()
            for context in dropped:
                unused.extend(self._end_step(context))
            self._controller.prefetcher.drop_queue()
            self._table.start_all_tenancies()
            committer.forgive()
            self._state.failure = None
            self._state.wake_all()
        self._controller.buffers.give_back(unused)
        return ResetReport(
            rows_cleared, requests_forgotten, len(dropped), writes_dropped, None if failure is None else repr(failure)
        )

    def stats(self) -> CacheStats:
        """Counters and held resources at this moment."""
        controller = self._controller
        with self._state.lock:
            return CacheStats(
                steps_saved=self._steps_saved,
                steps_materialized=self._steps_materialized,
                steps_discarded=self._steps_discarded,
                rows_delivered=self._rows_delivered,
                rows_from_hits=self._rows_from_hits,
                rows_rescued=controller.committer.rows_rescued,
                requests_failed=self._refusals.count,
                open_steps=len(self._steps),
                live_requests=len(self._requests),
                live_reads=len(controller.live_reads),
                pinned_slots=self._table.pinned_slots,
                queued_writes=len(controller.committer.open_tasks),
                staging_slots_in_use=len(controller.staging.in_use),
                key_row_bytes={key: spec.row_bytes for key, spec in controller.pool.specs.items()},
                pool_reserved_bytes=controller.pool.reserved_bytes,
                pinned_bytes=controller.staging.pinned_bytes,
                device_bytes=controller.staging.device_bytes,
                recycled_bytes=controller.buffers.recycled_bytes,
            )

    def close(self, timeout_s: float = 10.0) -> bool:
        """Land what is queued, end the threads, free staging. Bounded by about twice `timeout_s`. Idempotent.

        Returns:
            Whether everything ended in time; if not, staging memory is left to the process rather than unmapped under
            a running copy.
        """
        with self._state.lock:
            if self._state.closing:
                return True
            self._state.closing = True
            self._state.wake_all()
        return self._controller.close(timeout_s)

    # -- events, with the state lock held -----------------------------------------------------------------------------

    def _apply(self, digest: EventDigest) -> None:
        for req_id in digest.ended:
            self._requests.end(req_id)
        self._table.start_tenancies(digest.fresh_blocks)
        for source, destination in digest.copies:
            self._copy_block(source, destination)
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

    def _copy_block(self, source: int, destination: int) -> None:
        offsets = np.arange(self.config.block_size, dtype=np.int64)
        source_slots = source * self.config.block_size + offsets
        destination_slots = destination * self.config.block_size + offsets
        parts = []
        write_id = self._table.next_write_id()
        for key in self._table.keys:
            present = self._table.present_ids(key, source_slots) != ABSENT
            if present.any():
                parts.append(PoolRows(key, source_slots[present], destination_slots[present]))
                self._table.claim((key,), destination_slots[present], write_id)
        task = WriteTask(f"copy of block {source} to block {destination}", write_id, destination_slots)
        task.copy_slots = tuple(parts)
        self._controller.committer.enqueue(task)

    # -- saving -------------------------------------------------------------------------------------------------------

    def _check_size(self, inputs: StepInputs, num_tokens: int) -> None:
        needed_bytes = step_nbytes(inputs)
        if needed_bytes > self.config.staging_arena_bytes:
            raise StepTooLargeError(
                f"the step's {num_tokens} rows and other outputs take {needed_bytes} bytes, but a staging arena has "
                f"{self.config.staging_arena_bytes} (max_num_tokens={self.config.max_num_tokens}, "
                f"extra_row_bytes={self.config.extra_row_bytes}, extra_step_bytes={self.config.extra_step_bytes}); "
                "raise the one that is too small"
            )

    def _claim_staging(self) -> StagingSlot:
        staging = self._controller.staging
        unused: list[HostBuffer] = []
        slot = None
        with self._state.lock:
            if self._started_reads is None and self._state.usable:
                raise StepOrderError("save_outputs was called without new_step_starts; announce each step once, first")
            self._state.wait(lambda: staging.has_free, self.config.staging_claim_timeout_s)
            if self._state.usable:
                slot = staging.try_claim(_CLAIM_HOLDER)
            else:
                unused.extend(self._end_unsaved_step())
            unread = ", ".join(self._steps.labels()) or "none"
            writes = ", ".join(map(str, self._controller.committer.open_tasks)) or "none"
        self._controller.buffers.give_back(unused)
        self._check_usable("save_outputs")
        if slot is None:
            raise OmniPrefixCacheStagingTimeoutError(
                f"no staging slot became free within staging_claim_timeout_s={self.config.staging_claim_timeout_s}: "
                f"staging_depth={self.config.staging_depth} slots are held by unread steps ({unread}) and writes "
                f"({writes}); materialize or discard the steps, or raise staging_depth"
            )
        return slot

    def _prepare_keys(self, inputs: StepInputs) -> dict[str, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        tables = {}
        for value in inputs.token_values:
            if not value.stored or value.key in self._table.keys:
                continue
            if value.key not in self._controller.pool:
                self._controller.add_key(value.key, RowSpec(tuple(value.rows.shape[1:]), value.rows.dtype))
            tables[value.key] = self._table.new_key_tables()
        return tables

    def _commit_step(self, layout: StepLayout, record: StepRecord, slot: StagingSlot) -> int:
        """Claim the step's writes, plan again what they touch, promise its rows. State lock held."""
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
        if self._requests.any_owed:
            self._plan_owed(context)
        if self._policy.needs_full_hidden_states:
            for read in context.reads:
                context.failed.update(self._refusals.absent_hidden(context.label, read))
        self._requests.promise(rows, positions[starts[1:] - 1] + 1)
        self._steps.add(context)
        self._controller.committer.enqueue(task)
        self._steps_saved += 1
        return step_id

    def _plan_owed(self, context: StepContext) -> None:
        requests = []
        lengths = np.diff(context.starts).tolist()
        for req_id, length in zip(context.req_ids, lengths, strict=True):
            if req_id in context.failed or context.read_of(req_id) is not None:
                continue
            owed = self._requests.take_owed(req_id)
            if owed is not None:
                requests.append(ReadRequest(req_id, owed.positions, owed.slots, length))
        if requests:
            context.reads.append(self._planner.plan(context.label, requests))

    # -- consuming ----------------------------------------------------------------------------------------------------

    def _read_failures(self, context: StepContext, read: StepRead) -> dict[str, RequestError]:
        cause = read.error or f"not gathered within join_timeout_s={self.config.join_timeout_s}"
        return {
            req_id: ReadFailedError(req_id, f"{context.label}: stored rows could not be read ({cause}); they stay owed")
            for req_id in read.spans
            if req_id not in context.failed
        }

    def _join(self, context: StepContext, req_ids: list[str]) -> Joined:
        self._runtime.checkpoint("materialize.join")
        runs = context.runs(tuple(req_ids))
        reads = {req_id: read for req_id in req_ids if (read := context.read_of(req_id)) is not None}
        return join_step(context.record, runs, reads, self._controller.pool.specs, self._controller.buffers)

    def _finish_step(self, context: StepContext, served: Mapping[str, RequestRows]) -> list[HostBuffer]:
        """End a consumed step; returns the buffers its served requests' rows lie in. No lock held."""
        kept: list[HostBuffer] = []
        undelivered = context.runs(tuple(req_id for req_id in context.req_ids if req_id not in served))
        from_hits = sum(rows.num_rows for rows in served.values()) - sum(
            run.num_rows for run in context.runs(tuple(served))
        )
        with self._state.lock:
            for read in context.reads:
                if not served.keys().isdisjoint(read.spans):
                    kept.extend(read.take_buffers())
            unused = self._end_step(context)
            self._rows_delivered += sum(rows.num_rows for rows in served.values())
            self._rows_from_hits += from_hits
            for run in undelivered:
                self._owe(context, run)
        self._controller.buffers.give_back(unused)
        return kept

    def _owe(self, context: StepContext, run: BatchRun) -> None:
        """The step's rows of this request were not delivered. State lock held."""
        serial = int(context.serials[run.index])
        stored = context.read_of(run.req_id)
        if stored is not None:
            span = stored.spans[run.req_id]
            self._requests.owe(run.req_id, serial, span.positions, stored.slots[span.entries])
        rows = slice(run.first, run.last)
        self._requests.owe(run.req_id, serial, context.positions[rows], context.slots[rows])

    def _end_step(self, context: StepContext) -> list[HostBuffer]:
        """Release a step's reads and its hold on staging. State lock held."""
        unused: list[HostBuffer] = []
        for read in context.reads:
            unused.extend(self._planner.end(read))
        self._controller.staging.release(context.staging_slot, context.holder)
        self._state.progress.notify_all()
        return unused

    def _end_unsaved_step(self) -> list[HostBuffer]:
        """End the reads of a step that was started and not saved; its hits stay owed. State lock held."""
        unused: list[HostBuffer] = []
        for read in self._started_reads or ():
            unused.extend(self._planner.end(read))
            for req_id, span in read.spans.items():
                serial = self._requests.serial(req_id)
                self._requests.owe(req_id, serial, span.positions, read.slots[span.entries])
        self._started_reads = None
        return unused

    def _check_usable(self, what: str) -> None:
        with self._state.lock:
            self._state.check_usable(what)
