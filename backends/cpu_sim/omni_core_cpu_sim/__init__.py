# SPDX-License-Identifier: Apache-2.0
"""The CPU simulator: a backend with real asynchrony and no hardware, for tests, demonstrations and vLLM on CPU."""

from omni_core_cpu_sim._backend import CpuSimBackend
from omni_core_cpu_sim._gate import CopyGate
from omni_core_cpu_sim._graph import CaptureSizePadding, GraphEmulator
from omni_core_cpu_sim._memory import POISON_BYTE

__all__ = ["POISON_BYTE", "CaptureSizePadding", "CopyGate", "CpuSimBackend", "GraphEmulator"]
