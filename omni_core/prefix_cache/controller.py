# SPDX-License-Identifier: Apache-2.0
"""Moves data: owns staging, the copy stream, the pool and the two helper threads; decides nothing about rows."""

from __future__ import annotations

import logging

import torch

from omni_core.backend import BackendError, DeviceBackend
from omni_core.prefix_cache.block_pool import BlockMap, PrefixBlockPool
from omni_core.prefix_cache.buffers import HostBufferPool
from omni_core.prefix_cache.committer import Committer
from omni_core.prefix_cache.config import PrefixCacheConfig
from omni_core.prefix_cache.prefetcher import Prefetcher
from omni_core.prefix_cache.reads import StepRead
from omni_core.prefix_cache.slot_table import SlotTable
from omni_core.prefix_cache.staging import StagingBufferPool, StagingSlot
from omni_core.prefix_cache.state import CacheState
from omni_core.prefix_cache.step_inputs import StepInputs
from omni_core.prefix_cache.step_record import StepRecord, record_step
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
        self._backend = backend
        self.live_reads: list[StepRead] = []
        self.staging = StagingBufferPool(backend, config.staging_depth, config.staging_arena_bytes, device)
        self.pool = PrefixBlockPool(BlockMap(config.num_blocks, config.block_size))
        self.buffers = HostBufferPool(config.max_recycled_bytes, runtime)
        self._copy_stream = backend.new_stream("omni-core-copy")
        self.committer = Committer(
            state,
            table,
            self.pool,
            self.staging,
            self.buffers,
            self.live_reads,
            backend,
            runtime,
            config.join_timeout_s,
        )
        self.prefetcher = Prefetcher(
            state, table, self.pool, self.buffers, self.committer, backend, runtime, config.join_timeout_s
        )

    def record(self, inputs: StepInputs, slot: StagingSlot) -> StepRecord:
        """Clone a step's tensors and start their copy to host. Engine thread, no lock held; never blocks."""
        # Engines save under inference mode, whose tensors our threads may not write; or with gradients on.
        with torch.inference_mode(False), torch.no_grad():
            return record_step(inputs, self._backend, slot, self.staging.device_carver(slot), self._copy_stream)

    def close(self, timeout_s: float, *, pages_free: bool) -> bool:
        """End the threads after `state.closing` was set, then free staging. No lock held.

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
        else:
            logger.error("helper threads did not end within %s s; staging memory stays allocated", timeout_s)
        return ended
