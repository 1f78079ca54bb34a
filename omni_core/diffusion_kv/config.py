# SPDX-License-Identifier: Apache-2.0
"""What an operator sets for a diffusion stage, checked: a `DiffusionKVConfig` that exists can be run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from omni_core.diffusion_kv.errors import DiffusionKVConfigError
from omni_core.diffusion_kv.refusals import check_settings
from omni_core.diffusion_kv.setting_values import checked_names, checked_values
from omni_core.diffusion_kv.settings import (
    AttentionOwnerKind,
    DiffusionKVMode,
    DiffusionKVSettings,
    SequenceParallelKind,
)

__all__ = ["AttentionOwnerKind", "DiffusionKVConfig", "DiffusionKVMode", "SequenceParallelKind"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusionKVConfig(DiffusionKVSettings):
    """The settings of one diffusion stage. Those of an enum also take its name as text.

    Raises:
        DiffusionKVConfigTypeError: a value of the wrong type; a bool is no int.
        DiffusionKVConfigError: a value, or several together, that this stage cannot run with; names each setting, its
            value and what to do.
    """

    def __post_init__(self) -> None:
        for name, value in checked_values(self).items():
            object.__setattr__(self, name, value)
        check_settings(self)

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any]) -> DiffusionKVConfig:
        """The configuration with these settings, the others at their defaults.

        Raises:
            DiffusionKVConfigError: an unknown name; names the nearest. And what the class itself refuses.
        """
        return cls(**checked_names(settings, tuple(field.name for field in fields(cls)), of="a diffusion stage"))

    @property
    def paged(self) -> bool:
        """Whether the scheduler owns the keys and values."""
        return self.diffusion_kv_mode is DiffusionKVMode.PAGED_SCHEDULER

    @property
    def max_rows(self) -> int:
        """CFG rows a request may have.

        Raises:
            DiffusionKVConfigError: none were set, which only `dense_legacy` allows.
        """
        if self.diffusion_kv_max_rows_per_request is None:
            raise DiffusionKVConfigError(
                "diffusion_kv_max_rows_per_request is not set, and only a paged stage needs it; set it to the CFG rows "
                "of a request"
            )
        return self.diffusion_kv_max_rows_per_request

    @property
    def native_max_num_seqs(self) -> int:
        """What vLLM calls `max_num_seqs`: each row of a request is a sequence to it. Only of a paged stage."""
        return self.max_num_seqs * self.max_rows

    @property
    def wave_requests(self) -> int:
        """Requests that share a forward at most."""
        return self.max_num_seqs if self.max_wave_requests is None else self.max_wave_requests
