# SPDX-License-Identifier: Apache-2.0
"""The Ascend NPU backend: what is Huawei's own; the rest is `AcceleratorBackend`."""

from __future__ import annotations

from collections.abc import Mapping

from omni_core.backend import GraphPadding
from omni_core.backend.accelerator import CLOSE_TIMEOUT_S, AcceleratorBackend, DeviceModule
from omni_core.runtime import Runtime
from omni_core_npu._availability import reason_for
from omni_core_npu._device_module import native_module
from omni_core_npu._graph import graph_padding
from omni_core_npu._pinning import host_pinning
from omni_core_npu._versions import software


class NpuBackend(AcceleratorBackend):
    """Ascend devices, through torch_npu.

    Args:
        runtime: makes the locks and the sleeps of waits; there are no threads.
        device_index: which device; `None`: the calling thread's.
        close_timeout_s: how long closing a stream, or the backend, waits for queued work.
        device_module: `torch.npu`; `None`: that of this process, into which torch_npu is imported.

    Raises:
        BackendUnavailableError: the machine cannot run it, and no `device_module` was given.
        BackendOptionError: an option is out of range.
    """

    name = "npu"
    device_type = "npu"

    def __init__(
        self,
        runtime: Runtime,
        *,
        device_index: int | None = None,
        close_timeout_s: float = CLOSE_TIMEOUT_S,
        device_module: DeviceModule | None = None,
    ) -> None:
        if device_module is None:
            self.require_available()
            device_module = native_module()
        pinning = host_pinning(device_module)
        self._npu = device_module
        super().__init__(runtime, device_module, pinning, device_index=device_index, close_timeout_s=close_timeout_s)

    @classmethod
    def unavailable_reason(cls) -> str | None:
        return reason_for("torch_npu")

    def software(self) -> Mapping[str, str]:
        return software(self._npu)

    def graph_padding(self, capture_sizes: tuple[int, ...]) -> GraphPadding:
        return graph_padding(capture_sizes)
