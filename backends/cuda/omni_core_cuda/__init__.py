# SPDX-License-Identifier: Apache-2.0
"""The CUDA backend of Omni Core, registered as `cuda` under `omni_core.backends`."""

from omni_core_cuda._availability import TorchBuild, installed_torch, reason_for
from omni_core_cuda._backend import CudaBackend
from omni_core_cuda._device_module import CudaModule, native_module
from omni_core_cuda._versions import driver_version

__all__ = [
    "CudaBackend",
    "CudaModule",
    "TorchBuild",
    "driver_version",
    "installed_torch",
    "native_module",
    "reason_for",
]
