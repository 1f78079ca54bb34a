# SPDX-License-Identifier: Apache-2.0
"""What a simulated stage around an author's model is like."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from omni_core.testing.scheduler_config import SchedulerConfig


@dataclass(frozen=True, slots=True)
class ModelStageConfig:
    """A stage around an author's model."""

    scheduler: SchedulerConfig = field(default_factory=lambda: SchedulerConfig(256, 4, 256))
    """Limits, and how often it does what is rare; the default has 256 blocks of 4 tokens."""
    staging_depth: int = 4
    """Steps that may be saved and not yet built."""
    capture_sizes: tuple[int, ...] = ()
    """Token counts of captured graphs: rows lie in static buffers, padded to them. Empty: eager."""
    device_staging_bytes: int = 1 << 20
    """Device memory for rows of deferred keys."""
    vocabulary: int | None = None
    """Tokens that requests go on with are below this; `None`: up to the largest of the first prompt."""
    drafts_accepted: float = 0.6
    """Chance, between 0 and 1, that a draft token after accepted ones is accepted, too."""
    row_bytes: int | None = None
    """Most bytes per token of all outputs but hidden states; `None`: plenty, by what the first prompt shows."""
    backend: str = "cpu_sim"
    backend_options: Mapping[str, Any] = field(default_factory=dict)
