# SPDX-License-Identifier: Apache-2.0
"""What a policy with deferred keys allocates, once: a device ring, and two pinned buffers to copy through."""

from __future__ import annotations

import torch

from omni_core.backend import DeviceBackend
from omni_core.backend.memory import aligned_nbytes
from omni_core.prefix_cache.config import PrefixCacheConfig
from omni_core.prefix_cache.device_ring import DeviceRing
from omni_core.prefix_cache.policy import ModelCachePolicy
from omni_core.prefix_cache.staging import BounceBuffer

_NUM_BOUNCES = 2
"""One is put into the pool while the next record is on its way into the other."""


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
        self.max_record_bytes = min(self.ring.capacity_bytes, _page_room_bytes(config, policy))
        self.bounces: list[BounceBuffer] = []
        try:
            for index in range(_NUM_BOUNCES):
                self.bounces.append(BounceBuffer(index, backend.pinned_arena(self.max_record_bytes)))
        except BaseException:
            self.close()
            raise

    @property
    def pinned_bytes(self) -> int:
        """Host bytes really page-locked."""
        return sum(bounce.pinned_bytes for bounce in self.bounces)

    @property
    def device_bytes(self) -> int:
        """Device bytes of the ring."""
        return self.ring.device_bytes

    def close(self) -> None:
        """Give all memory back. No copy may still run. Idempotent."""
        for bounce in self.bounces:
            bounce.close()
        self.ring.close()


def _page_room_bytes(config: PrefixCacheConfig, policy: ModelCachePolicy) -> int:
    """Most bytes of a staging page that the deferred rows of one step can take."""
    hidden_bytes = config.max_num_tokens * config.hidden_row_bytes if policy.needs_full_hidden_states else 0
    return max(aligned_nbytes(1), aligned_nbytes(config.staging_arena_bytes - hidden_bytes))
