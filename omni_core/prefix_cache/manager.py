# SPDX-License-Identifier: Apache-2.0
"""The cache's public face: keeps the tables that mirror the engine's KV cache, and plans what is read and written."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from omni_core.backend import DeviceBackend
from omni_core.backend.host_pages import resident_bytes
from omni_core.prefix_cache.acknowledgement import UnacknowledgedRows
from omni_core.prefix_cache.block_pool import RowSpec
from omni_core.prefix_cache.buffers import HostBuffer
from omni_core.prefix_cache.config import PrefixCacheConfig
from omni_core.prefix_cache.controller import OmniPrefixCacheController
from omni_core.prefix_cache.delivery import Joined, copy_step, join_step
from omni_core.prefix_cache.errors import (
    CacheClosedError,
    CacheFailedError,
    JoinTimeoutError,
    OmniPrefixCacheError,
    OmniPrefixCacheStagingTimeoutError,
    ReadFailedError,
    RequestError,
    StepOrderError,
    StepTooLargeError,
)
from omni_core.prefix_cache.event_digest import digest_events
from omni_core.prefix_cache.events import StepEvents, StepLayout
from omni_core.prefix_cache.host_limit import host_memory
from omni_core.prefix_cache.host_memory import check_deferred_memory, check_host_memory
from omni_core.prefix_cache.layout_check import LayoutChecker
from omni_core.prefix_cache.outputs import PartialRequest, StageCacheOutputs
from omni_core.prefix_cache.planner import ReadPlanner
from omni_core.prefix_cache.policy import ModelCachePolicy
from omni_core.prefix_cache.pretouch import OnPretouch
from omni_core.prefix_cache.reads import StepRead
from omni_core.prefix_cache.refusals import RequestRefusals
from omni_core.prefix_cache.requests import RequestTable
from omni_core.prefix_cache.settlement import StepSettlement
from omni_core.prefix_cache.sizing import StageSizes
from omni_core.prefix_cache.slot_table import ABSENT, NO_ADAPTER, SlotTable
from omni_core.prefix_cache.staging import StagingSlot
from omni_core.prefix_cache.state import CacheState
from omni_core.prefix_cache.stats import CacheStats, ResetReport, VersionReport
from omni_core.prefix_cache.step_context import OpenSteps, StepContext, StepEnd
from omni_core.prefix_cache.step_inputs import OutputClassifier, StepInputs
from omni_core.prefix_cache.step_intake import StepIntake
from omni_core.prefix_cache.step_record import StepRecord, check_devices, step_nbytes
from omni_core.prefix_cache.weight_versions import WeightVersions
from omni_core.runtime import Runtime

logger = logging.getLogger(__name__)

_CLAIM_HOLDER = "save_outputs"
"""The name under which `save_outputs` holds a staging slot until the step and its write do."""


@dataclass(frozen=True, slots=True)
class _ReservedKey:
    """What a new key needs, made before the lock is taken."""

    spec: RowSpec
    rows: torch.Tensor
    tables: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]


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
            HostMemoryError: staging does not fit the memory this process may use.
            MemoryError: staging was refused by the device.
        """
        known_rows = {key: spec.row_bytes for key, spec in config.key_rows.items()}
        self._sizes = StageSizes(config, known_rows, device_is_host=device.type == "cpu")
        check_host_memory(self._sizes, host_memory())
        self.config = config
        self._backend = backend
        self._layout_source = layout_source
        self._runtime = runtime
        self._state = CacheState(runtime)
        self._table = SlotTable(config.num_blocks, config.block_size)
        self._requests = RequestTable(config.block_size, config.max_partial_reports)
        self._controller = OmniPrefixCacheController(config, backend, self._state, self._table, runtime, device)
        self._refusals = RequestRefusals(self._requests)
        self._steps = OpenSteps()
        self._versions = WeightVersions()
        planner = ReadPlanner(
            self._state,
            self._table,
            self._controller.prefetcher,
            self._controller.deferred,
            self._controller.live_reads,
        )
        self._intake = StepIntake(
            self._table,
            self._requests,
            self._refusals,
            planner,
            self._controller.committer,
            self._controller.deferred,
            self._steps,
        )
        self._settlement = StepSettlement(
            self._state,
            self._requests,
            planner,
            self._controller.staging,
            self._controller.buffers,
            config.delivery,
        )
        self._policy = ModelCachePolicy()
        self._layouts = LayoutChecker(config)
        self._classifier = OutputClassifier(config, self._policy)
        self._closed = False
        # A daemon thread inside torch when the interpreter ends aborts the process (faults.md, row 105).
        atexit.register(self.close)
        self._steps_saved = self._steps_materialized = self._steps_discarded = 0

    def register_policy(self, policy: ModelCachePolicy, *, on_pretouch: OnPretouch | None = None) -> None:
        """Take the model's declaration. Engine thread, at load, before the first step.

        Slow if it declares deferred keys: allocates `device_staging_bytes` on the device, and two pinned buffers. Slow
        with `pretouch`: commits the pool's memory for hidden rows, if they are kept, and for `key_rows`.

        Args:
            policy: the model's.
            on_pretouch: told how far the pre-touch has come, on the calling thread.

        Raises:
            StepOrderError: a step has already started.
            CacheClosedError: the cache is closed.
            HostMemoryError: memory for deferred rows or the pre-touch is not there; nothing was changed.
            MemoryError: the device or the host refused; nothing was changed.
        """
        with self._state.lock:
            if self._intake.any_step_started:
                raise StepOrderError("register_policy was called after the first step; register it at load")
            if self._state.closing:
                raise CacheClosedError("register_policy: the cache is closed")
        if policy.deferred_keys:
            keeps_hidden = policy.needs_full_hidden_states
            sizes = replace(self._sizes, deferred_keys=policy.deferred_keys, keeps_hidden=keeps_hidden)
            check_deferred_memory(sizes, host_memory())
        prepared = self._controller.pretouch(policy, on_pretouch) if self.config.pretouch else {}
        memory = self._controller.allocate_deferred(policy)
        with self._state.lock:
            closed = self._state.closing
            unused = memory if closed else self._controller.defer(policy, memory)
            if not closed:
                self._controller.pool.prepare(prepared)
            self._policy = policy
            self._classifier = OutputClassifier(self.config, policy)
        if unused is not None:
            unused.close()
        if closed:
            raise CacheClosedError("register_policy: the cache was closed meanwhile")

    # -- engine thread ------------------------------------------------------------------------------------------------

    def new_step_starts(self, events: StepEvents) -> None:
        """Hear what is scheduled, before the forward. Engine thread; never blocks.

        Applies all tenancy changes, then plans and pins the reads of prefix hits, whose gathering starts at once. A
        step that was started before and never saved ends here; its hits stay owed to their requests.

        Raises:
            SlotOutOfRangeError: a block id lies outside the KV cache; nothing was changed.
            CacheFailedError, CacheClosedError: see `CacheState.problem`.
        """
        digest = digest_events(events, self._table)
        unused: list[HostBuffer] = []
        with self._state.lock:
            unused.extend(self._intake.end_unsaved_step())
            problem = self._state.problem("new_step_starts")
            if problem is None:
                self._intake.start_step(digest)
        self._controller.buffers.give_back(unused)
        if problem is not None:
            raise problem

    def save_outputs(
        self,
        hidden: torch.Tensor | None,
        mm_outputs: Mapping[str, Any],
        *,
        num_tokens_unpadded: int,
        num_tokens_padded: int,
        carry_owed: bool = True,
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
            carry_owed: whether the step also carries rows of earlier steps that were not delivered; `False` for a step
                the caller already knows it will discard.

        Returns:
            The step id, to be consumed exactly once.

        Raises:
            StepOrderError, LayoutMismatchError, SlotOutOfRangeError, BlockSizeMismatchError: wrong input; nothing was
                changed.
            KeyShapeChangedError, StepTooLargeError, NoBackendForTensorError: the same.
            HostMemoryError: there is no address space for a new key's rows; the same.
            OmniPrefixCacheStagingTimeoutError: unread steps hold every staging slot; names them.
            CacheFailedError, CacheClosedError: see `CacheState.problem`.
        """
        layout = self._layout_source()
        all_stored = self._layouts.check(layout, num_tokens_unpadded)
        inputs = self._classifier.understand(
            hidden, mm_outputs, num_tokens_unpadded, num_tokens_padded, len(layout.req_ids)
        )
        if not inputs.is_known:
            check_devices(inputs, self._backend)
            self._check_size(inputs, num_tokens_unpadded)
        slot, epoch = self._claim_staging()
        record: StepRecord | None = None
        step_id = 0
        unused: list[HostBuffer] = []
        try:
            new_keys = {} if inputs.is_known else self._reserve_keys(inputs)
            record = self._controller.record(inputs, slot)
            self._runtime.checkpoint("save_outputs.recorded")
        finally:
            with self._state.lock:
                problem = self._state.problem("save_outputs")
                if problem is None and self._state.epoch != epoch:
                    problem = StepOrderError("save_outputs: the cache was reset meanwhile; announce the step again")
                if record is not None and problem is None:
                    for key, reserved in new_keys.items():
                        self._controller.pool.add_key(key, reserved.spec, reserved.rows)
                        self._table.add_key(key, reserved.tables)
                    self._classifier.confirm(inputs)
                    step_id = self._intake.save_step(
                        layout,
                        record,
                        slot,
                        all_stored=all_stored,
                        hidden_needed=self._policy.needs_full_hidden_states,
                        carry_owed=carry_owed,
                    )
                    self._steps_saved += 1
                elif problem is not None:
                    unused.extend(self._intake.end_unsaved_step())
                if record is not None and problem is not None:
                    self._controller.drop(record, slot)
                self._controller.staging.release(slot, _CLAIM_HOLDER)
                self._state.leave_pages()
            self._controller.buffers.give_back(unused)
        if problem is not None:
            raise problem
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
            sampled_counts: for every request of the step that has drafts, how many tokens were sampled after its run:
                `len(sampled_token_ids)`, one more than its drafts that were accepted. The rows of the others are left
                out. Other requests are never clipped.

        Returns:
            Rows of every request that could be served; the others with their error in `failed`.

        Raises:
            UnknownStepError, StepAlreadyMaterializedError, StepAlreadyDiscardedError: misuse; nothing was changed.
            RequestNotInStepError, DraftCountMissingError, DraftCountError: the same.
            JoinTimeoutError: the step's copy did not complete in time. The step is consumed, its rows stay owed.
            CacheFailedError, CacheClosedError: see `CacheState.problem`. The step is consumed.
        """
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

    def discard_step(self, step_id: int, sampled_counts: Mapping[str, int] | None = None) -> None:
        """Give a step's rows up and consume the step. Its rows are still stored, and owed to their requests.

        Args:
            step_id: from `save_outputs`.
            sampled_counts: as for `materialize`; needed only if the step has drafts.

        Raises:
            UnknownStepError, StepAlreadyMaterializedError, StepAlreadyDiscardedError: misuse; nothing was changed.
            DraftCountMissingError, DraftCountError: the same.
            CacheFailedError, CacheClosedError: see `CacheState.problem`. The step is consumed.
        """
        what = f"discard of step {step_id}"
        with self._state.lock:
            context = self._consume(step_id, StepEnd.DISCARDED, (), sampled_counts, what)
            problem = self._state.problem(what)
        self._settlement.settle(context, Joined({}, []))
        if problem is not None:
            raise problem

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until every row saved before the call is in the pool, at most `timeout_s` (`join_timeout_s`).

        Deferred rows leave the device for it.

        Raises:
            JoinTimeoutError: names the open steps and the writes still under way.
            CacheFailedError, CacheClosedError: see `CacheState.problem`.
        """
        limit_s = self.config.join_timeout_s if timeout_s is None else timeout_s
        committer = self._controller.committer
        with self._state.lock:
            target = self._table.last_write_id
            epoch = self._state.epoch
            record = self._controller.deferred.force_all("flush") if self._state.usable else ABSENT
            landed = self._state.wait(lambda: committer.have_ended(target, record), limit_s)
            under_way = self._under_way()
            problem = self._state.problem("flush")
            if problem is None and self._state.epoch != epoch:
                problem = CacheFailedError("flush: the cache was reset meanwhile; the writes it waited for are gone")
        if problem is not None:
            raise problem
        if not landed:
            raise JoinTimeoutError(f"flush: writes did not land within {limit_s} s; open: {under_way}")

    def take_partial_requests(self) -> tuple[PartialRequest, ...]:
        """Ended requests with rows that were promised and never delivered, once each."""
        with self._state.lock:
            return self._requests.take_partial()

    def reset(self) -> ResetReport:
        """Forget every row, request, open step and failure. Waits for the write under way, at most `join_timeout_s`.

        Rows written before are never served again. Requests that are live have to be started again; until they end,
        they are answered with `RequestNotStartedError`.

        Raises:
            JoinTimeoutError: the write under way did not end; nothing was reset.
            CacheClosedError: the cache is closed.
        """
        committer = self._controller.committer
        unused: list[HostBuffer] = []
        with self._state.lock:
            if self._state.closing:
                raise CacheClosedError("reset: the cache is closed")
            committer.pause()
            try:
                idle = self._state.progress.wait_for(lambda: not committer.writing, self.config.join_timeout_s)
                writes_dropped = committer.drop_queue() if idle else 0
                records_dropped = self._controller.deferred.drop_open() if idle else 0
            finally:
                committer.go_on()
            if self._state.closing:
                raise CacheClosedError("reset: the cache was closed meanwhile")
            if not idle:
                raise JoinTimeoutError(
                    f"reset: the write under way did not end within join_timeout_s={self.config.join_timeout_s}; "
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
        report = ResetReport(
            rows_cleared=rows_cleared,
            requests_forgotten=requests_forgotten,
            steps_dropped=len(dropped),
            writes_dropped=writes_dropped,
            deferred_records_dropped=records_dropped,
            bytes_cleared=sum(rows * row_bytes[key] for key, rows in rows_cleared.items()),
            failure_cleared=None if failure is None else repr(failure),
        )
        logger.info("the prefix cache was reset: %s", report)
        return report

    def bump_weight_version(self) -> VersionReport:
        """The weights have changed: no step announced from now on is served a row of a step announced before.

        Any thread; never blocks. Live requests and open steps stay: what a step has planned it still delivers, and rows
        written from now on are present. Call it once the weights have changed and before the next step is announced. A
        step announced before and saved after the call counts as computed before.

        The engine's own prefix cache has to forget as well: a request that hits its old blocks is answered with
        `HitRowsAbsentError`. A request that is still owed rows of the old weights is, too.

        Raises:
            CacheClosedError: the cache is closed.
        """
        return self._bump_version(None)

    def bump_adapter_version(self, adapter_id: int) -> VersionReport:
        """As `bump_weight_version`, for the rows that one adapter computed; see `RequestEvent.adapter_id`.

        Raises:
            ValueError: `adapter_id` stands for no adapter.
            CacheClosedError: the cache is closed.
        """
        if adapter_id <= NO_ADAPTER:
            raise ValueError(f"bump_adapter_version: adapter_id={adapter_id}: must be the id of an adapter, above 0")
        return self._bump_version(adapter_id)

    def _bump_version(self, adapter_id: int | None) -> VersionReport:
        # Walks tables, so without the lock.
        rows_absent = self._table.present_rows(adapter_id)
        with self._state.lock:
            if self._state.closing:
                raise CacheClosedError("bump of a version: the cache is closed")
            if not self._intake.expire_version(adapter_id):
                rows_absent = dict.fromkeys(rows_absent, 0)
            version = self._versions.bump(adapter_id)
        report = VersionReport(adapter_id, version, rows_absent)
        logger.info("new version of %s: %s", "the weights" if adapter_id is None else f"adapter {adapter_id}", report)
        return report

    def stats(self) -> CacheStats:
        """Counters and held resources at this moment."""
        controller = self._controller
        pinned_bytes, fixed = controller.pinned_bytes, controller.fixed_memory()
        with self._state.lock:
            memory = controller.with_keys(fixed)
            return CacheStats(
                steps_saved=self._steps_saved,
                steps_materialized=self._steps_materialized,
                steps_discarded=self._steps_discarded,
                rows_delivered=self._settlement.counts.rows,
                rows_from_hits=self._settlement.counts.rows_from_hits,
                rows_rescued=controller.committer.rows_rescued,
                requests_failed=self._refusals.count,
                open_steps=len(self._steps),
                live_requests=len(self._requests),
                live_reads=len(controller.live_reads),
                pinned_slots=self._table.pinned_slots,
                queued_writes=len(controller.committer.open_tasks),
                staging_slots_in_use=len(controller.staging.in_use),
                key_row_bytes={key: spec.row_bytes for key, spec in controller.pool.specs.items()},
                deferred_records=controller.deferred.num_charged,
                deferred_bytes=controller.deferred.charged_bytes,
                deferred_writes_open=controller.deferred.writes_open,
                deferred_copies=controller.copier.copies_made,
                pool_reserved_bytes=sum(memory.pool_bytes.values()),
                pinned_bytes=pinned_bytes,
                device_bytes=fixed.device_bytes,
                recycled_bytes=controller.buffers.recycled_bytes,
                memory=memory,
                weight_version=self._versions.weights,
                adapter_versions=self._versions.adapters,
            )

    def resident_pool_bytes(self) -> dict[str, int]:
        """Key → memory really behind its rows now, of `stats().memory.pool_bytes`. Any thread; hold no lock.

        Asks the kernel about each page: 20 ms for 64 GiB of rows. Not for a step's path.
        """
        with self._state.lock:
            rows = self._controller.pool.all_rows
        return {key: resident_bytes(each) for key, each in rows.items()}

    def close(self, timeout_s: float = 10.0) -> bool:
        """Land what is queued, end the threads, free staging. Bounded by about three times `timeout_s`.

        An interpreter that ends does it too; until then a cache that was never closed is kept alive.

        A call after a complete one does nothing; a call after an incomplete one tries again.

        Returns:
            Whether everything ended in time; if not, staging memory is left to the process rather than unmapped under
            a running copy.
        """
        with self._state.lock:
            if self._closed:
                return True
            self._state.closing = True
            self._intake.end_unsaved_step()
            self._controller.deferred.drop_open()
            for context in self._steps.consume_all():
                self._settlement.end_step(context)
            self._state.wake_all()
            pages_free = self._state.progress.wait_for(lambda: self._state.page_users == 0, timeout_s)
        self._closed = self._controller.close(timeout_s, pages_free=pages_free)
        if self._closed:
            atexit.unregister(self.close)
        return self._closed

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

    def _claim_staging(self) -> tuple[StagingSlot, int]:
        """A staging slot, and the epoch it was claimed in."""
        staging = self._controller.staging
        unused: list[HostBuffer] = []
        slot = None
        holders = ""
        with self._state.lock:
            if self._state.usable and not self._intake.step_under_way:
                raise StepOrderError("save_outputs was called without new_step_starts; announce each step once, first")
            epoch = self._state.epoch
            if not staging.has_free:
                self._state.wait(lambda: staging.has_free, self.config.staging_claim_timeout_s)
            problem = self._state.problem("save_outputs")
            if problem is None and self._state.epoch != epoch:
                problem = StepOrderError("save_outputs: the cache was reset meanwhile; announce the step again")
            if problem is not None:
                unused.extend(self._intake.end_unsaved_step())
            else:
                slot = staging.try_claim(_CLAIM_HOLDER)
                if slot is not None:
                    self._state.enter_pages()
                else:
                    holders = self._under_way()
        self._controller.buffers.give_back(unused)
        if problem is not None:
            raise problem
        if slot is None:
            raise OmniPrefixCacheStagingTimeoutError(
                f"no staging slot became free within staging_claim_timeout_s={self.config.staging_claim_timeout_s}: "
                f"staging_depth={self.config.staging_depth} slots are held by {holders}; "
                "materialize or discard the steps, or raise staging_depth"
            )
        return slot, epoch

    def _under_way(self) -> str:
        """Steps, writes and copies that have not ended, in words for errors. State lock held."""
        return f"unread steps ({', '.join(self._steps.labels()) or 'none'}) and {self._controller.under_way()}"

    def _reserve_keys(self, inputs: StepInputs) -> dict[str, _ReservedKey]:
        """Room for keys that the step brings for the first time; nothing knows of it until the step is saved."""
        reserved = {}
        for value, tensor in inputs.token_values():
            if value.stored and value.key not in self._controller.pool:
                spec = RowSpec(tuple(tensor.shape[1:]), tensor.dtype)
                rows = self._controller.pool.reserve(value.key, spec)
                reserved[value.key] = _ReservedKey(spec, rows, self._table.new_key_tables())
        return reserved

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
            self._steps_materialized += 1
        else:
            self._steps_discarded += 1
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
            self.config.join_timeout_s,
        )
        problem = self._state.problem(what)
        if problem is None and self._state.epoch != epoch:
            return CacheFailedError(f"{what}: the cache was reset while it waited; the step's rows are gone")
        late = next((write for write in (task, deferred) if write is not None and not write.host_ready), None)
        if problem is None and late is not None:
            return JoinTimeoutError(
                f"{what}: its copy did not complete within join_timeout_s={self.config.join_timeout_s}: {late}; its "
                f"rows stay owed to their requests; open: {self._under_way()}"
            )
        return problem

    def _read_failures(self, context: StepContext, read: StepRead) -> dict[str, RequestError]:
        cause = read.error or f"not gathered within join_timeout_s={self.config.join_timeout_s}"
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
