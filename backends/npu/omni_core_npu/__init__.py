# SPDX-License-Identifier: Apache-2.0
"""The Ascend NPU backend of Omni Core, registered as `npu` under `omni_core.backends`."""

from omni_core_npu._availability import PROBE_TIMEOUT_S, reason_for
from omni_core_npu._backend import NpuBackend
from omni_core_npu._device_module import native_module

__all__ = ["PROBE_TIMEOUT_S", "NpuBackend", "native_module", "reason_for"]
