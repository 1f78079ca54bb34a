# SPDX-License-Identifier: Apache-2.0
"""The cache's public face: keeps the tables that mirror the engine's KV cache, and plans what is read and written."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from omni_core.backend import DeviceBackend
from omni_core.backend.host_pages import resident_bytes
from omni_core.prefix_cache.buffers import HostBuffer
from omni_core.prefix_cache.cache_reset import CacheReset
from omni_core.prefix_cache.config import PrefixCacheConfig
from omni_core.prefix_cache.controller import OmniPrefixCacheController
from omni_core.prefix_cache.errors import (
    CacheClosedError,
    CacheFailedError,
    JoinTimeoutError,
    StepOrderError,
)
from omni_core.prefix_cache.event_digest import digest_events
from omni_core.prefix_cache.events import StepEvents, StepLayout
from omni_core.prefix_cache.host_limit import host_memory
from omni_core.prefix_cache.host_memory import check_host_memory, check_staging_memory
from omni_core.prefix_cache.outputs import PartialRequest, StageCacheOutputs
from omni_core.prefix_cache.planner import ReadPlanner
from omni_core.prefix_cache.policy import ModelCachePolicy
from omni_core.prefix_cache.pretouch import OnPretouch
from omni_core.prefix_cache.refusals import RequestRefusals
from omni_core.prefix_cache.requests import RequestTable
from omni_core.prefix_cache.settlement import StepSettlement
from omni_core.prefix_cache.sizing import StageSizes
from omni_core.prefix_cache.slot_table import ABSENT, SlotTable, is_adapter_id
from omni_core.prefix_cache.state import CacheState
from omni_core.prefix_cache.stats import CacheStats, ResetReport, VersionReport
from omni_core.prefix_cache.step_consumer import StepConsumer
from omni_core.prefix_cache.step_context import OpenSteps
from omni_core.prefix_cache.step_intake import StepIntake
from omni_core.prefix_cache.step_saver import StepSaver
from omni_core.prefix_cache.weight_versions import WeightVersions
from omni_core.runtime import Runtime

logger = logging.getLogger(__name__)


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
        check_staging_memory(self._sizes, host_memory())
        self.config = config
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
        self._saver = StepSaver(
            config,
            backend,
            layout_source,
            self._state,
            self._table,
            self._controller,
            self._intake,
            self._steps,
            runtime,
        )
        self._consumer = StepConsumer(config, self._state, self._controller, self._steps, self._settlement, runtime)
        self._reset = CacheReset(
            config,
            self._state,
            self._table,
            self._requests,
            self._controller,
            self._intake,
            self._settlement,
            self._steps,
        )
        self._closed = False
        # A daemon thread inside torch when the interpreter ends aborts the process (faults.md, row 105).
        atexit.register(self.close)

    def register_policy(
        self,
        policy: ModelCachePolicy,
        *,
        on_pretouch: OnPretouch | None = None,
        sink_queue_bytes: int = 0,
        sink_bytes: int = 0,
    ) -> None:
        """Take the model's declaration. Engine thread, at load, before the first step.

        Slow if it declares deferred keys: allocates `device_staging_bytes` on the device, and two pinned buffers. Slow
        with `pretouch`: commits the pool's memory for hidden rows, if they are kept, and for `key_rows`. What all that
        comes to is checked before, and logged: as a warning if it may outgrow the host.

        Args:
            policy: the model's.
            on_pretouch: told how far the pre-touch has come, on the calling thread.
            sink_queue_bytes: most bytes of delivered rows that the caller lets wait, counted in the memory check.
            sink_bytes: most bytes of rows that the caller's sink holds in memory, counted too.

        Raises:
            StepOrderError: a step has already started.
            CacheClosedError: the cache is closed.
            HostMemoryError: memory for deferred rows or the pre-touch is not there; nothing was changed.
            JoinTimeoutError: no part of the pre-touch was done within `join_timeout_s`; nothing was changed.
            MemoryError: the device or the host refused; nothing was changed.
        """
        with self._state.lock:
            if self._intake.any_step_started:
                raise StepOrderError("register_policy was called after the first step; register it at load")
            if self._state.closing:
                raise CacheClosedError("register_policy: the cache is closed")
        sizes = replace(
            self._sizes,
            deferred_keys=policy.deferred_keys,
            keeps_hidden=policy.needs_full_hidden_states,
            sink_queue_bytes=sink_queue_bytes,
            sink_bytes=sink_bytes,
        )
        check_host_memory(sizes, host_memory(), taken_bytes=self._sizes.before_policy.plan().start_bytes)
        prepared = self._controller.pretouch(policy, on_pretouch) if self.config.pretouch else {}
        memory = self._controller.allocate_deferred(policy)
        with self._state.lock:
            closed = self._state.closing
            unused = memory if closed else self._controller.defer(policy, memory)
            if not closed:
                self._controller.pool.prepare(prepared)
            self._saver.use(policy)
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
            HostMemoryError: there is no address space for a new key's rows or tables; the same.
            OmniPrefixCacheStagingTimeoutError: unread steps hold every staging slot; names them.
            CacheFailedError, CacheClosedError: see `CacheState.problem`.
        """
        return self._saver.save(hidden, mm_outputs, num_tokens_unpadded, num_tokens_padded, carry_owed=carry_owed)

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
        return self._consumer.materialize(step_id, req_ids, sampled_counts)

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
        self._consumer.discard(step_id, sampled_counts)

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
            under_way = self._controller.under_way(self._steps)
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
        report = self._reset.reset()
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
        if not is_adapter_id(adapter_id):
            raise ValueError(f"bump_adapter_version: adapter_id={adapter_id!r}: must be the id of an adapter, above 0")
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
                steps_saved=self._saver.steps_saved,
                steps_materialized=self._consumer.steps_materialized,
                steps_discarded=self._consumer.steps_discarded,
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
            self._saver.forget_places()
            atexit.unregister(self.close)
        return self._closed
