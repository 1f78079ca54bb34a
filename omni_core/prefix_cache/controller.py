# SPDX-License-Identifier: Apache-2.0
"""Moves data: owns staging, the copy stream, the pool and the two helper threads; decides nothing about rows."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from omni_core.backend import BackendError, DeviceBackend
from omni_core.backend.memory import CARVE_ALIGNMENT_BYTES
from omni_core.prefix_cache.abandoned_copies import AbandonedCopies
from omni_core.prefix_cache.block_pool import BlockMap, PrefixBlockPool, RowSpec
from omni_core.prefix_cache.buffers import HostBufferPool
from omni_core.prefix_cache.committer import TASK_HOLDER, Committer
from omni_core.prefix_cache.config import HIDDEN_KEY, PrefixCacheConfig
from omni_core.prefix_cache.deferred_copier import DeferredCopier
from omni_core.prefix_cache.deferred_memory import DeferredMemory
from omni_core.prefix_cache.deferred_records import DeferredRecords
from omni_core.prefix_cache.policy import ModelCachePolicy
from omni_core.prefix_cache.pool_writer import PoolWriter
from omni_core.prefix_cache.prefetcher import Prefetcher
from omni_core.prefix_cache.pretouch import OnPretouch, pretouch
from omni_core.prefix_cache.reads import StepRead
from omni_core.prefix_cache.sizing import CacheMemory
from omni_core.prefix_cache.slot_table import SlotTable
from omni_core.prefix_cache.staging import StagingBufferPool, StagingSlot
from omni_core.prefix_cache.state import CacheState
from omni_core.prefix_cache.step_context import OpenSteps
from omni_core.prefix_cache.step_inputs import StepInputs
from omni_core.prefix_cache.step_record import DeferredPlace, StepRecord, deferrable, record_known_step, record_step
from omni_core.runtime import Runtime

logger = logging.getLogger(__name__)


class OmniPrefixCacheController:
    """The moving half of the cache; the manager keeps the tables.

    `live_reads` is the list of reads that have not ended: the manager adds and removes under the state lock, the
    committer looks for rows to set aside.
    """

    def __init__(
        self,
        config: PrefixCacheConfig,
        backend: DeviceBackend,
        state: CacheState,
        table: SlotTable,
        runtime: Runtime,
        device: torch.device,
    ) -> None:
        """Allocate staging and start the threads. Slow; when the cache is built.

        Raises:
            MemoryError: staging was refused; nothing is left behind.
        """
        self._config = config
        self._backend = backend
        self._state = state
        self._table = table
        self._device = device
        self.live_reads: list[StepRead] = []
        self.staging = StagingBufferPool(
            backend,
            config.staging_depth,
            config.staging_arena_bytes,
            device,
            pin_chunk_bytes=config.pin_chunk_bytes,
        )
        self.pool = PrefixBlockPool(BlockMap(config.num_blocks, config.block_size))
        self.buffers = HostBufferPool(config.max_recycled_bytes, runtime)
        self._copy_stream = backend.new_stream("omni-core-copy")
        self._runtime = runtime
        self._memory: DeferredMemory | None = None
        self._abandoned = AbandonedCopies(state, backend, runtime)
        writer = PoolWriter(state, table, self.pool, self.buffers, self.live_reads, runtime)
        self.copier = DeferredCopier(
            state,
            writer,
            self.staging,
            self._abandoned,
            backend,
            self._copy_stream,
            runtime,
            config.join_timeout_s,
        )
        self.committer = Committer(
            state, table, writer, self.copier, self.staging, self._abandoned, runtime, config.join_timeout_s
        )
        self.deferred = DeferredRecords(self.committer, self.copier)
        self.prefetcher = Prefetcher(
            state, table, self.pool, self.buffers, self.committer, backend, runtime, config.join_timeout_s
        )

    @property
    def pinned_bytes(self) -> int:
        """Host bytes really page-locked. No lock needed."""
        return self.staging.pinned_bytes + (0 if self._memory is None else self._memory.pinned_bytes)

    def fixed_memory(self) -> CacheMemory:
        """What was allocated once, by what it is for; of no key. No lock held: asks the backend."""
        deferred = self._memory
        return CacheMemory(
            staging_bytes=self.staging.staging_bytes,
            bounce_bytes=0 if deferred is None else deferred.bounce_bytes,
            snapshot_ring_bytes=self.staging.device_bytes,
            deferred_ring_bytes=0 if deferred is None else deferred.device_bytes,
            pool_bytes={},
            key_table_bytes={},
            shared_table_bytes=self._table.shared_bytes,
            max_recycled_bytes=self.buffers.max_recycled_bytes,
        )

    def with_keys(self, fixed: CacheMemory) -> CacheMemory:
        """`fixed_memory` with what the keys have reserved by now. State lock held."""
        return replace(fixed, pool_bytes=self.pool.reserved_bytes, key_table_bytes=self._table.key_bytes)

    def allocate_deferred(self, policy: ModelCachePolicy) -> DeferredMemory | None:
        """Allocate what the policy's deferred keys need, if anything, and reserve the tables of every key it names.

        Slow; engine thread, before the first step. No lock held.

        Raises:
            MemoryError: refused; nothing is left behind.
        """
        memory = self._deferred_memory(policy)
        hidden = (HIDDEN_KEY,) if policy.needs_full_hidden_states else ()
        self._table.key_tables.reserve((*hidden, *policy.token_keys, *policy.deferred_keys))
        return memory

    def _deferred_memory(self, policy: ModelCachePolicy) -> DeferredMemory | None:
        if not policy.deferred_keys or self._config.device_staging_bytes < CARVE_ALIGNMENT_BYTES:
            return None
        return DeferredMemory(self._config, policy, self._backend, self._device)

    def pretouch(
        self, policy: ModelCachePolicy, on_progress: OnPretouch | None
    ) -> dict[str, tuple[RowSpec, torch.Tensor]]:
        """Reserve and commit the rows of every key that is known beforehand. Slow; before the first step. No lock held.

        Raises:
            HostMemoryError: there is no memory for them.
            JoinTimeoutError: no part of it was done within `join_timeout_s`.
        """
        config = self._config
        specs = dict(config.key_rows)
        if policy.needs_full_hidden_states:
            specs[HIDDEN_KEY] = RowSpec((config.hidden_size,), config.hidden_dtype)
        reserved = {key: (spec, self.pool.reserve(key, spec)) for key, spec in specs.items()}
        with torch.inference_mode(False):
            pages = [rows.view(-1).view(torch.uint8) for _, rows in reserved.values()]
        pretouch(pages, self._runtime, stuck_after_s=config.join_timeout_s, on_progress=on_progress)
        return reserved

    def defer(self, policy: ModelCachePolicy, memory: DeferredMemory | None) -> DeferredMemory | None:
        """Use this memory for the policy's deferred keys. State lock held, before the first step.

        Returns:
            The memory used until now, to be closed.
        """
        unused, self._memory = self._memory, memory
        self.deferred.defer(policy.deferred_keys, memory)
        return unused

    def record(self, inputs: StepInputs, slot: StagingSlot) -> StepRecord:
        """Clone a step's tensors and start their copy to host. Engine thread, no lock held; never blocks."""
        place = None if self._memory is None else self._charge(self._memory, inputs)
        try:
            places = inputs.form.places.get((slot.index, place is not None))
            if places is not None and not inputs.form.requires_grad:
                return record_known_step(inputs, places, self._backend, slot, self._copy_stream, place)
            # Engines save under inference mode, whose tensors our threads may not write; or with gradients on.
            with torch.inference_mode(False), torch.no_grad():
                return record_step(
                    inputs, self._backend, slot, self.staging.device_carver(slot), self._copy_stream, place
                )
        except BaseException:
            if place is not None:
                with self._state.lock:
                    place.ring.give_back(place.ticket)
            raise

    def _charge(self, memory: DeferredMemory, inputs: StepInputs) -> DeferredPlace | None:
        """Room on the device for a step's deferred rows; `None` if there are none, or not room for all of them."""
        numbers, nbytes = deferrable(inputs, self._backend)
        if not numbers or nbytes > memory.max_record_bytes:
            return None
        with self._state.lock:
            ticket = memory.ring.try_charge(nbytes)
        if ticket is None:
            return None
        self._runtime.checkpoint("save_outputs.deferred_charged")
        return DeferredPlace(memory.ring, ticket, numbers)

    def drop(self, record: StepRecord, slot: StagingSlot) -> None:
        """The step was recorded and cannot be saved: nobody wants its rows. State lock held."""
        if record.copy_done is not None:
            self.committer.abandon(slot, record.copy_done)
        if record.deferred is not None:
            self.copier.give_up(record.deferred)

    def drop_half_saved(self, record: StepRecord, slot: StagingSlot) -> None:
        """An internal error ended the saving of a step half way: its page must not stay held. State lock held."""
        queued = TASK_HOLDER in slot.holders
        for holder in slot.holders - {TASK_HOLDER}:
            self.staging.release(slot, holder)
        if not queued:  # else the write ends the page's use itself
            self.drop(record, slot)

    def under_way(self, steps: OpenSteps) -> str:
        """Steps, writes and copies that have not ended, in words for errors. State lock held."""
        unread = ", ".join(steps.labels()) or "none"
        writes = ", ".join(map(str, self.committer.open_tasks)) or "none"
        words = [f"unread steps ({unread}) and writes ({writes})"]
        open_writes = self.deferred.open_writes()
        if open_writes:
            words.append(f"deferred writes on the device ({open_writes})")
        places = self._abandoned.places
        if places:
            words.append(f"copies whose rows nobody wants, still running into {', '.join(places)}")
        return ", ".join(words)

    def close(self, timeout_s: float, *, pages_free: bool) -> bool:
        """End the threads after `state.closing` was set, then free staging and the deferred rows' ring. No lock held.

        Args:
            timeout_s: how long to wait for each thread.
            pages_free: whether every caller has left the staging pages.

        Returns:
            Whether all ended in time. If not, staging stays mapped, because someone may still be using it.
        """
        ended = self.committer.join(timeout_s) and self.prefetcher.join(timeout_s) and pages_free
        if ended:
            try:
                self._copy_stream.close()
            except BackendError as error:
                logger.error("the copy stream did not end, staging memory stays allocated: %s", error)
                return False
            self.staging.close()
            if self._memory is not None:
                self._memory.close()
        else:
            logger.error("helper threads did not end within %s s; staging memory stays allocated", timeout_s)
        return ended
