# SPDX-License-Identifier: Apache-2.0
"""The CUDA backend of Omni Core, registered as `cuda` under `omni_core.backends`."""

from omni_core_cuda._availability import TorchBuild, installed_torch, reason_for
from omni_core_cuda._backend import CudaBackend

__all__ = ["CudaBackend", "TorchBuild", "installed_torch", "reason_for"]
