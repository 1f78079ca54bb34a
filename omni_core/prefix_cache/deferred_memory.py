# SPDX-License-Identifier: Apache-2.0
"""What a policy with deferred keys allocates, once: a device ring, and two pinned buffers to copy through."""

from __future__ import annotations

import torch

from omni_core.backend import DeviceBackend
from omni_core.prefix_cache.config import PrefixCacheConfig
from omni_core.prefix_cache.device_ring import DeviceRing
from omni_core.prefix_cache.policy import ModelCachePolicy
from omni_core.prefix_cache.sizing import NUM_BOUNCES, max_record_bytes
from omni_core.prefix_cache.staging import BounceBuffer


class DeferredMemory:
    """A record is at most as large as the ring and as a bounce buffer."""

    def __init__(
        self, config: PrefixCacheConfig, policy: ModelCachePolicy, backend: DeviceBackend, device: torch.device
    ) -> None:
        """Allocate. Slow; at start-up only.

        Raises:
            MemoryError: the device or the host refused; what was allocated before is given back.
        """
        self.ring = DeviceRing(backend, config.device_staging_bytes, device)
        self.max_record_bytes = max_record_bytes(config, keeps_hidden=policy.needs_full_hidden_states)
        self.bounces: list[BounceBuffer] = []
        try:
            for index in range(NUM_BOUNCES):
                arena = backend.pinned_arena(self.max_record_bytes, chunk_bytes=config.pin_chunk_bytes)
                self.bounces.append(BounceBuffer(index, arena))
        except BaseException:
            self.close()
            raise

    @property
    def pinned_bytes(self) -> int:
        """Host bytes really page-locked."""
        return sum(bounce.pinned_bytes for bounce in self.bounces)

    @property
    def bounce_bytes(self) -> int:
        """Host bytes of the bounce buffers, page-locked where the device can."""
        return sum(bounce.nbytes for bounce in self.bounces)

    @property
    def device_bytes(self) -> int:
        """Device bytes of the ring."""
        return self.ring.device_bytes

    def close(self) -> None:
        """Give all memory back. No copy may still run. Idempotent."""
        for bounce in self.bounces:
            bounce.close()
        self.ring.close()
