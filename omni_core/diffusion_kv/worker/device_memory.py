# SPDX-License-Identifier: Apache-2.0
"""Where the worker's device tensors come from: the backend of the device, asked at start-up and never again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from omni_core.backend.base import DeviceBackend, SnapshotRing
from omni_core.backend.memory import aligned_nbytes, tensor_nbytes
from omni_core.diffusion_kv.errors import DiffusionKVConfigError


class DeviceMemory(Protocol):
    """Allocates on one device and gives all of it back at once. Slow; for start-up, by the worker's thread."""

    @property
    def device(self) -> torch.device:
        """Where the tensors lie."""
        ...

    def allocate(self, count: int, shape: Sequence[int], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """`count` contiguous tensors of arbitrary content.

        Raises:
            MemoryError, RuntimeError: the device has not that much; names the bytes.
        """
        ...

    def close(self) -> None:
        """Free what was allocated; nothing may use it any more. Idempotent."""
        ...


class BackendMemory:
    """`DeviceMemory` of a `DeviceBackend`, so that its books show the pool."""

    def __init__(self, backend: DeviceBackend, device: torch.device) -> None:
        """Allocate nothing yet.

        Args:
            backend: owns the device; stays the caller's, who closes it after this.
            device: torch's name of it, with an index where there are several.

        Raises:
            DiffusionKVConfigError: the backend owns another kind of device.
        """
        if device.type != backend.device_type:
            raise DiffusionKVConfigError(
                f"backend {backend.name!r} owns {backend.device_type!r} tensors and the KV pool is to lie on "
                f"{str(device)!r}; give the backend of that device"
            )
        self._backend = backend
        self._device = device
        self._rings: list[SnapshotRing] = []

    @property
    def device(self) -> torch.device:
        return self._device

    def allocate(self, count: int, shape: Sequence[int], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        ring = self._backend.snapshot_ring(count, aligned_nbytes(tensor_nbytes(shape, dtype)), self._device)
        self._rings.append(ring)
        return tuple(ring.slot(index).take(shape, dtype) for index in range(count))

    def close(self) -> None:
        while self._rings:
            self._rings.pop().close()
