# SPDX-License-Identifier: Apache-2.0
"""What a simulated stage is like: its scheduler, the cache's limits, and how outputs are built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from omni_core.prefix_cache.config import Delivery
from omni_core.testing.scheduler_config import SchedulerConfig


@dataclass(frozen=True, slots=True)
class StageConfig:
    """A stage."""

    scheduler: SchedulerConfig
    staging_depth: int = 4
    capture_sizes: tuple[int, ...] = ()
    """Token counts of captured graphs: steps are padded to them and outputs are static buffers. Empty: eager."""
    declare_keys: bool = True
    """Whether the policy declares the model's further keys; else the cache finds out what they are."""
    deferred_keys: frozenset[str] = frozenset()
    """Further keys of the model that may stay on the device until their request ends; always declared."""
    device_staging_bytes: int = 1 << 20
    """Device memory for rows of deferred keys."""
    delivery: Delivery = Delivery.ON_MATERIALIZE
    drafts_accepted: float = 0.6
    """Chance, between 0 and 1, that a draft token after accepted ones is accepted, too."""
    kernel_block_size: int | None = None
    """Given: tokens per block of the attention kernel; divides the scheduler's block size."""
    threaded_builder: bool = False
    shuffle_batch_seed: int | None = None
    leftovers: bool = False
    backend: str = "cpu_sim"
    backend_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the kernel's block size.

        Raises:
            ValueError: it does not divide the scheduler's.
        """
        if self.kernel_block_size is not None and self.scheduler.block_size % self.kernel_block_size:
            raise ValueError(
                f"kernel_block_size={self.kernel_block_size} does not divide block_size={self.scheduler.block_size}"
            )
