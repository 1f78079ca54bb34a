# SPDX-License-Identifier: Apache-2.0
"""The CUDA backend: what is NVIDIA's own; the rest is `AcceleratorBackend`."""

from __future__ import annotations

from collections.abc import Mapping

from omni_core.backend import GraphPadding
from omni_core.backend.accelerator import CLOSE_TIMEOUT_S, AcceleratorBackend
from omni_core.runtime import Runtime
from omni_core_cuda._availability import installed_torch, reason_for
from omni_core_cuda._device_module import CudaModule, native_module
from omni_core_cuda._graph import graph_padding
from omni_core_cuda._pinning import host_pinning
from omni_core_cuda._versions import software


class CudaBackend(AcceleratorBackend):
    """NVIDIA devices, through torch's CUDA build.

    Args:
        runtime: makes the locks and the sleeps of waits; there are no threads.
        device_index: which device; `None`: the calling thread's.
        close_timeout_s: how long closing a stream, or the backend, waits for queued work.
        device_module: torch's, below the names that others replace; `None`: that of this process.

    Raises:
        BackendUnavailableError: the machine cannot run it, and no `device_module` was given.
        BackendOptionError: an option is out of range.
    """

    name = "cuda"
    device_type = "cuda"

    def __init__(
        self,
        runtime: Runtime,
        *,
        device_index: int | None = None,
        close_timeout_s: float = CLOSE_TIMEOUT_S,
        device_module: CudaModule | None = None,
    ) -> None:
        if device_module is None:
            self.require_available()
            device_module = native_module()
        pinning = host_pinning(device_module.cudart, self.device_type)
        super().__init__(runtime, device_module, pinning, device_index=device_index, close_timeout_s=close_timeout_s)

    @classmethod
    def unavailable_reason(cls) -> str | None:
        return reason_for(installed_torch())

    def software(self) -> Mapping[str, str]:
        return software()

    def graph_padding(self, capture_sizes: tuple[int, ...]) -> GraphPadding:
        return graph_padding(capture_sizes)
