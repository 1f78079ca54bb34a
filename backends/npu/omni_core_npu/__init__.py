# SPDX-License-Identifier: Apache-2.0
"""The Ascend NPU backend of Omni Core, registered as `npu` under `omni_core.backends`."""

from omni_core_npu._availability import PROBE_TIMEOUT_S, reason_for
from omni_core_npu._backend import NpuBackend

__all__ = ["PROBE_TIMEOUT_S", "NpuBackend", "reason_for"]
