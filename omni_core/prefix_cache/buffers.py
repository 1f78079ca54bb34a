# SPDX-License-Identifier: Apache-2.0
"""Host buffers for delivered rows, reused once released: a page that was touched costs a fifth of a fresh one."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

import torch

from omni_core.backend.memory import tensor_nbytes
from omni_core.runtime import Runtime

_GRANULE_BYTES = 1 << 16
"""Buffers are sized in steps of this, so that steps of slightly different size share them."""
_SMALL_GRANULE_BYTES = 1 << 12
"""The same for buffers below `_GRANULE_BYTES`: many of them may wait for a slow consumer at one time."""
_MAX_WASTE_FACTOR = 2
"""A free buffer serves a request of at least this fraction of its size."""


class HostBuffer:
    """Pageable host bytes, viewed as typed rows."""

    __slots__ = ("_bytes", "_kept_view")

    def __init__(self, nbytes: int) -> None:
        with torch.inference_mode(False):  # an inference tensor could not be written by our other threads
            self._bytes = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        self._kept_view = self._bytes

    @property
    def nbytes(self) -> int:
        """Size of the buffer."""
        return self._bytes.numel()

    def view(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The first bytes as a contiguous tensor of `shape` and `dtype`."""
        return self._bytes[: math.prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))

    def kept_view(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """As `view`, but the tensor itself is used again when the buffer is: never to be handed to a consumer."""
        if self._kept_view.shape != shape or self._kept_view.dtype != dtype:
            self._kept_view = self.view(shape, dtype)
        return self._kept_view


class HostBufferPool:
    """Leases host buffers and keeps released ones up to a cap. Any thread; its own lock covers a list, never bytes."""

    def __init__(self, max_recycled_bytes: int, runtime: Runtime) -> None:
        self._max_recycled_bytes = max_recycled_bytes
        self._lock = runtime.lock("host-buffers")
        self._free: list[HostBuffer] = []
        self._free_bytes = 0

    @property
    def recycled_bytes(self) -> int:
        """Bytes kept for reuse."""
        return self._free_bytes

    @property
    def max_recycled_bytes(self) -> int:
        """Most bytes kept for reuse."""
        return self._max_recycled_bytes

    def lease(self, shape: Sequence[int], dtype: torch.dtype) -> HostBuffer:
        """A buffer that holds at least `shape` of `dtype`; its content is undefined."""
        needed = tensor_nbytes(shape, dtype)
        granule = _GRANULE_BYTES if needed > _GRANULE_BYTES else _SMALL_GRANULE_BYTES
        nbytes = max(1, -(-needed // granule)) * granule
        with self._lock:
            at = bisect.bisect_left(self._free, nbytes, key=lambda buffer: buffer.nbytes)
            if at < len(self._free) and self._free[at].nbytes <= nbytes * _MAX_WASTE_FACTOR:
                buffer = self._free.pop(at)
                self._free_bytes -= buffer.nbytes
                return buffer
        return HostBuffer(nbytes)

    def give_back(self, buffers: Sequence[HostBuffer]) -> None:
        """Take buffers back for reuse; beyond the cap they are freed. Their views must not be read any more."""
        if not buffers:
            return
        dropped = []
        with self._lock:
            for buffer in buffers:
                if self._free_bytes + buffer.nbytes > self._max_recycled_bytes:
                    dropped.append(buffer)
                    continue
                bisect.insort(self._free, buffer, key=lambda each: each.nbytes)
                self._free_bytes += buffer.nbytes
        dropped.clear()
