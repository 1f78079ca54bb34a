# SPDX-License-Identifier: Apache-2.0
"""Page-locking through the CUDA runtime: `cudaHostRegister`, exact to the byte."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

from omni_core.backend import BackendError
from omni_core.backend.accelerator import RegisteredPinning

_DEFAULT = 0
"""`cudaHostRegisterDefault`."""


def host_pinning(cudart: Any, device_type: str) -> RegisteredPinning:
    """Page-locks through `cudart`, torch's binding of the runtime; `device_type` is torch's name of its devices."""

    def register(address: int, nbytes: int) -> None:
        status = cudart.cudaHostRegister(address, nbytes, _DEFAULT)
        if status != cudart.cudaError.success:
            _forget_last_error(device_type)
            raise MemoryError(
                f"cudaHostRegister: {cudart.cudaGetErrorString(status)}; set pin_chunk_bytes to less, and see the "
                "limits of the container and `ulimit -l`"
            )

    def unregister(address: int, nbytes: int) -> None:
        status = cudart.cudaHostUnregister(address)
        if status != cudart.cudaError.success:
            _forget_last_error(device_type)
            raise BackendError(
                f"cudaHostUnregister of {nbytes} bytes at {address:#x}: {cudart.cudaGetErrorString(status)}"
            )

    return RegisteredPinning(register, unregister)


def _forget_last_error(device_type: str) -> None:
    """Let the thread's next kernel launch be innocent.

    The runtime keeps a refusal until a launch of this thread reports it there (vllm-project/vllm#50070); torch does not
    bind `cudaGetLastError`, so a launch of our own takes it.
    """
    with suppress(RuntimeError):
        torch.empty(1, device=device_type).fill_(0)
