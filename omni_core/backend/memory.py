# SPDX-License-Identifier: Apache-2.0
"""Byte arenas and how typed tensors are carved from them, the same way on every backend."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

CARVE_ALIGNMENT_BYTES = 64
"""Every carved tensor starts on a multiple of this: the widest vector load of today's CPUs, a whole cache line."""


def aligned_nbytes(nbytes: int) -> int:
    """`nbytes` rounded up to `CARVE_ALIGNMENT_BYTES`."""
    return -(-nbytes // CARVE_ALIGNMENT_BYTES) * CARVE_ALIGNMENT_BYTES


def tensor_nbytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of a contiguous tensor of `shape` and `dtype`."""
    return math.prod(shape) * dtype.itemsize


class ByteCarver:
    """Hands out typed, aligned, contiguous views of one byte tensor, front to back.

    Two carvers asked for the same shapes in the same order carve at the same offsets; a step's device snapshot and its
    pinned page therefore mirror each other, and one transfer moves all keys of the step.

    Args:
        arena: uint8 tensor `(nbytes,)`, on any device.

    Not thread-safe: one owner at a time.
    """

    __slots__ = ("_arena", "_used_bytes")

    def __init__(self, arena: torch.Tensor) -> None:
        if arena.dtype != torch.uint8 or arena.dim() != 1:
            raise ValueError(f"arena must be a flat uint8 tensor, got {arena.dtype} of shape {tuple(arena.shape)}")
        self._arena = arena
        self._used_bytes = 0

    @property
    def capacity_bytes(self) -> int:
        """Size of the arena."""
        return self._arena.numel()

    @property
    def used_bytes(self) -> int:
        """Bytes handed out since the last `restart`, alignment included."""
        return self._used_bytes

    def restart(self) -> None:
        """Forget what was handed out; views handed out before now share bytes with later ones."""
        self._used_bytes = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The next view of `shape` and `dtype`.

        Raises:
            ValueError: the arena has not that many bytes left; nothing is handed out.
        """
        nbytes = tensor_nbytes(shape, dtype)
        end = self._used_bytes + aligned_nbytes(nbytes)
        if end > self.capacity_bytes:
            raise ValueError(
                f"arena of {self.capacity_bytes} bytes has {self.capacity_bytes - self._used_bytes} left, "
                f"asked for {nbytes} ({tuple(shape)} of {dtype})"
            )
        view = self._arena[self._used_bytes : self._used_bytes + nbytes].view(dtype).view(tuple(shape))
        self._used_bytes = end
        return view

    def used(self) -> torch.Tensor:
        """uint8 view of everything handed out so far, from the arena's first byte."""
        return self._arena[: self._used_bytes]
