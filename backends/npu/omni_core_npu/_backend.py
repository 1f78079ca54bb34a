# SPDX-License-Identifier: Apache-2.0
"""The Ascend NPU backend: knows whether this machine has an NPU; refuses, by name, to move data in this version."""

from __future__ import annotations

from typing import Any, Self

from omni_core.backend import BackendFeatureUnsupportedError, DeviceBackend
from omni_core.runtime import Runtime
from omni_core_npu._availability import reason_for


class NpuBackend(DeviceBackend):
    """Ascend devices, through torch_npu.

    Abstract in this version: `__new__` refuses before Python would complain about the methods left out.
    """

    name = "npu"
    device_type = "npu"
    refuses = "every copy: omni-core's `npu` package ships without its data path in this version"

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
        return reason_for("torch_npu")
