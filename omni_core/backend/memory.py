# SPDX-License-Identifier: Apache-2.0
"""Byte arenas and how typed tensors are carved from them, the same way on every backend."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

_Asked = tuple[int, tuple[int, ...], torch.dtype]
"""First byte, shape and dtype of a view."""

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

    __slots__ = ("_arena", "_carved", "_num_taken", "_typed", "_used_bytes", "_used_view")

    def __init__(self, arena: torch.Tensor) -> None:
        if arena.dtype != torch.uint8 or arena.dim() != 1:
            raise ValueError(f"arena must be a flat uint8 tensor, got {arena.dtype} of shape {tuple(arena.shape)}")
        self._arena = arena
        self._typed: dict[torch.dtype, torch.Tensor] = {}
        self._used_bytes = 0
        self._num_taken = 0
        # Steps of a decode phase ask for the same views in the same order; making a view is a torch operation.
        self._carved: list[tuple[_Asked, torch.Tensor, int]] = []
        self._used_view: torch.Tensor | None = None

    def sibling(self) -> ByteCarver:
        """Another carver of the same arena. What viewing the arena as another dtype costs is paid once for both."""
        carver = ByteCarver(self._arena)
        carver._typed = self._typed
        return carver

    @property
    def capacity_bytes(self) -> int:
        """Size of the arena."""
        return self._arena.numel()

    @property
    def used_bytes(self) -> int:
        """Bytes handed out since the last `restart`, alignment included."""
        return self._used_bytes

    def restart(self, first_byte: int = 0) -> None:
        """Start at `first_byte` again: later views share bytes with earlier ones, and equal ones are reused.

        `first_byte` is a multiple of `CARVE_ALIGNMENT_BYTES`; what lies in front of it counts as handed out.
        """
        self._used_bytes = first_byte
        self._num_taken = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The next view of `shape` and `dtype`.

        Raises:
            ValueError: the arena has not that many bytes left; nothing is handed out.
        """
        asked = (self._used_bytes, tuple(shape), dtype)
        if self._num_taken < len(self._carved):
            known, view, end = self._carved[self._num_taken]
            if known == asked:
                self._num_taken += 1
                self._used_bytes = end
                return view
        nbytes = tensor_nbytes(shape, dtype)
        end = self._used_bytes + aligned_nbytes(nbytes)
        if end > self.capacity_bytes:
            raise ValueError(
                f"arena of {self.capacity_bytes} bytes has {self.capacity_bytes - self._used_bytes} left, "
                f"asked for {nbytes} ({tuple(shape)} of {dtype})"
            )
        view = self._view(asked)
        self._carved[self._num_taken : self._num_taken + 1] = [(asked, view, end)]
        self._num_taken += 1
        self._used_bytes = end
        return view

    def used(self) -> torch.Tensor:
        """uint8 view of everything handed out so far, from the arena's first byte."""
        if self._used_view is None or self._used_view.numel() != self._used_bytes:
            self._used_view = self._arena[: self._used_bytes]
        return self._used_view

    def _view(self, asked: _Asked) -> torch.Tensor:
        start, shape, dtype = asked
        typed = self._typed.get(dtype)
        if typed is None:
            whole_bytes = self.capacity_bytes // dtype.itemsize * dtype.itemsize
            # Viewed under inference mode as another dtype, it could never be written outside.
            with torch.inference_mode(mode=False):
                typed = self._typed[dtype] = self._arena[:whole_bytes].view(dtype)
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        return typed.as_strided(shape, strides, typed.storage_offset() + start // dtype.itemsize)
