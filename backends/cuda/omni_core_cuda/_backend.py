# SPDX-License-Identifier: Apache-2.0
"""The CUDA backend: knows whether this machine has CUDA; refuses, by name, to move data in this version."""

from __future__ import annotations

from typing import Any, Self

from omni_core.backend import BackendFeatureUnsupportedError, DeviceBackend
from omni_core.runtime import Runtime
from omni_core_cuda._availability import installed_torch, reason_for


class CudaBackend(DeviceBackend):
    """NVIDIA devices, through torch's CUDA build.

    Abstract in this version: `__new__` refuses before Python would complain about the methods left out.
    """

    name = "cuda"
    device_type = "cuda"
    refuses = "every copy: omni-core's `cuda` package ships without its data path in this version"

    def __new__(cls, runtime: Runtime, **options: Any) -> Self:
        """Refuse.

        Raises:
            BackendFeatureUnsupportedError: always.
        """
        raise BackendFeatureUnsupportedError(
            f"backend {cls.name!r} refuses {cls.refuses}; run the stage on the CPU with the backend 'cpu_sim'"
        )

    @classmethod
    def unavailable_reason(cls) -> str | None:
        return reason_for(installed_torch())
