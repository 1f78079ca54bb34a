# SPDX-License-Identifier: Apache-2.0
"""`torch.cuda` below the names that others replace.

vLLM's CPU worker and vllm-ascend put stand-ins in the place of `torch.cuda.Stream`, `Event`, `stream`, `set_stream`,
`current_stream` and `mem_get_info` (backend-facts A4.2; vllm 0.32 `v1/worker/cpu/shm.py`). They reach neither the
classes of `torch.cuda.streams` nor torch's C functions, which the replaced ones called.
"""

from __future__ import annotations

from typing import Any

import torch

from omni_core.backend.accelerator import NativeStream


class CudaModule:
    """A `DeviceModule` of torch's own.

    Args:
        cuda: `torch.cuda`.
        binding: `torch._C`, whose `_cuda_*` functions are those that `torch.cuda` calls (torch 2.9 to 2.13,
            `torch/cuda/__init__.py`).
    """

    def __init__(self, cuda: Any, binding: Any) -> None:
        cuda.init()
        self.Stream: type[Any] = cuda.streams.Stream
        self.Event: type[Any] = cuda.streams.Event
        self.cudart: Any = cuda.cudart()
        self._name_of = cuda.get_device_name
        self._set_device = binding._cuda_setDevice
        self._get_device = binding._cuda_getDevice
        self._get_stream = binding._cuda_getCurrentStream
        self._set_stream = binding._cuda_setStream
        self._known: dict[tuple[int, int, int], NativeStream] = {}

    def set_device(self, device: int, /) -> None:
        """Give the calling thread a device. Without it, a new thread has device 0."""
        self._set_device(device)

    def current_device(self) -> int:
        """The calling thread's device."""
        device: int = self._get_device()
        return device

    def current_stream(self, device: int, /) -> NativeStream:
        """The calling thread's stream on a device; the same object each time."""
        key: tuple[int, int, int] = self._get_stream(device)
        known = self._known.get(key)
        if known is None:
            stream_id, device_index, device_type = key
            known = self.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)
            self._known[key] = known
        return known

    def set_stream(self, stream: Any, /) -> None:
        """Let the calling thread's work go to a stream."""
        self._set_stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)

    def get_device_name(self, device: int, /) -> str:
        """NVIDIA's name of a device."""
        name: str = self._name_of(device)
        return name

    def mem_get_info(self, device: int, /) -> tuple[int, int]:
        """Free and total bytes of a device."""
        free_bytes, total_bytes = self.cudart.cudaMemGetInfo(device)
        return free_bytes, total_bytes


def native_module() -> CudaModule:
    """torch's, of this process. Initialises CUDA."""
    return CudaModule(torch.cuda, torch._C)
