# SPDX-License-Identifier: Apache-2.0
"""A snapshot ring of plain buffers, each with a carver of its own."""

from __future__ import annotations

from abc import abstractmethod

import torch

from omni_core.backend.base import SnapshotRing
from omni_core.backend.memory import ByteCarver


class CarvedRing(SnapshotRing):
    """What the rings of backends that account for their buffers share.

    Args:
        buffers: uint8 device tensors `(nbytes,)`, one per slot.
    """

    def __init__(self, buffers: tuple[torch.Tensor, ...]) -> None:
        self._buffers = buffers
        self._carvers = tuple(map(ByteCarver, buffers))
        self._device_bytes = sum(buffer.numel() for buffer in buffers)

    def slot(self, index: int) -> ByteCarver:
        """The carver over buffer `index`, restarted.

        Raises:
            IndexError: no such buffer, or the ring is closed.
        """
        if not 0 <= index < len(self._carvers):
            raise IndexError(f"snapshot ring has {len(self._carvers)} buffers, asked for {index}")
        carver = self._carvers[index]
        carver.restart()
        return carver

    @property
    def device_bytes(self) -> int:
        return self._device_bytes

    def close(self) -> None:
        """Free the buffers. Idempotent.

        Raises:
            BackendError: a queued copy still reads from one; the ring stays open.
        """
        if self._buffers:
            self._remove_from_books(self._buffers)
            self._buffers = ()
            self._carvers = ()
            self._device_bytes = 0

    @abstractmethod
    def _remove_from_books(self, buffers: tuple[torch.Tensor, ...]) -> None:
        """The ring is about to drop these. Raises if it must not."""
