# SPDX-License-Identifier: Apache-2.0
"""Why a machine cannot run CUDA, told from torch's build and the CUDA runtime, never from `torch.cuda`.

vLLM's CPU, XPU and Ascend workers, and torch_npu's `transfer_to_npu`, replace functions and classes of `torch.cuda`
with stand-ins; the facts read here lie below those replacements.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """What the installed torch was built for, and how to count the devices it sees."""

    torch_version: str
    cuda_version: str | None
    """The CUDA version it was built for; `None` without CUDA."""
    hip_version: str | None
    """The ROCm version it was built for; ROCm devices are called `cuda` in torch too."""
    has_cuda: bool
    """Whether its CUDA code was compiled in."""
    count_devices: Callable[[], int]
    """Devices the CUDA runtime sees. Warns, and returns 0, where there is no usable driver."""


def installed_torch() -> TorchBuild:
    """The torch of this process. Touches no device."""
    return TorchBuild(
        torch_version=torch.__version__,
        cuda_version=torch.version.cuda,
        hip_version=torch.version.hip,
        has_cuda=torch._C._has_cuda,  # what `torch.backends.cuda.is_built` returns
        count_devices=_count_devices,
    )


def reason_for(build: TorchBuild) -> str | None:
    """Why a process with this torch cannot run CUDA, or `None` if it can. Never raises."""
    if build.hip_version is not None:
        return (
            f"torch {build.torch_version} is built for ROCm {build.hip_version}, which this backend does not run on; "
            "install a CUDA build of torch"
        )
    if build.cuda_version is None or not build.has_cuda:
        return f"torch {build.torch_version} is built without CUDA; install a CUDA build of torch"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            count = build.count_devices()
        except Exception as error:
            return f"the CUDA {build.cuda_version} runtime cannot count devices: {type(error).__name__}: {error}"
    if count > 0:
        return None
    said = " ".join(" ".join(str(warning.message).split()) for warning in caught)
    return f"the CUDA {build.cuda_version} runtime sees no device" + (
        f": {said}" if said else "; see `nvidia-smi` and CUDA_VISIBLE_DEVICES"
    )


def _count_devices() -> int:
    # What `torch.cuda.is_available` calls (torch/cuda/__init__.py, 2.13). It exists in CUDA builds only.
    count: int = torch._C._cuda_getDeviceCount()
    return count
