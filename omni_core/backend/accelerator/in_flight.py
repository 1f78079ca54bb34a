# SPDX-License-Identifier: Apache-2.0
"""What queued copies read and write: kept alive until they have ended, and for ever if nobody can tell."""

from __future__ import annotations

from collections import deque
from enum import Enum, auto

import torch

from omni_core.backend.accelerator.events import AcceleratorEvent
from omni_core.backend.errors import DeviceCopyError
from omni_core.runtime import Runtime


class MemoryUse(Enum):
    """What copies do with a piece of memory."""

    NONE = auto()
    QUEUED = auto()
    """A copy will end, and has not."""
    UNKNOWN = auto()
    """A copy failed, or failed to be queued whole: the device may still read or write there."""


CopyParts = tuple[tuple[torch.Tensor, torch.Tensor], ...]
"""Destinations and sources of one copy that has to be made in several; all destinations lie in one storage, and so do
all sources."""


class QueuedCopy:
    """One copy."""

    __slots__ = ("done", "parts")

    def __init__(self, parts: CopyParts) -> None:
        self.parts = parts
        self.done: AcceleratorEvent | None = None
        """`None` until its event is recorded."""

    def touches(self, storage_address: int) -> bool:
        """Whether it reads or writes the storage at that address."""
        return any(tensor.untyped_storage().data_ptr() == storage_address for tensor in self.parts[0])


class CopiesInFlight:
    """The copies of one stream. Any thread; asks events, never waits, and holds its lock over its own tables only.

    Args:
        runtime: makes the lock.
        stream_name: for diagnostics.
    """

    def __init__(self, runtime: Runtime, stream_name: str) -> None:
        self._lock = runtime.lock(f"accelerator.stream.{stream_name}.copies")
        self._queued: deque[QueuedCopy] = deque()
        self._lost: list[QueuedCopy] = []

    def begin(self, parts: CopyParts) -> QueuedCopy:
        """Keep what a copy uses, before it is queued."""
        copy = QueuedCopy(parts)
        with self._lock:
            self._queued.append(copy)
        return copy

    def lose(self, copy: QueuedCopy) -> None:
        """Whether the copy runs, and when it ends, cannot be known any more: keep what it uses for ever."""
        with self._lock:
            if copy in self._queued:
                self._queued.remove(copy)
                self._lost.append(copy)

    def settle(self) -> None:
        """Let go of what ended copies used, oldest first, up to the first that has not ended. Never blocks."""
        while True:
            with self._lock:
                oldest = self._queued[0] if self._queued else None
            if oldest is None or oldest.done is None:
                return
            try:
                if not oldest.done.query():
                    return
            except DeviceCopyError:
                self.lose(oldest)
                continue
            with self._lock:
                if self._queued and self._queued[0] is oldest:
                    self._queued.popleft()

    def use_of(self, storage_address: int) -> MemoryUse:
        """What copies that are not known to have ended do with the storage at that address."""
        with self._lock:
            if any(copy.touches(storage_address) for copy in self._queued):
                return MemoryUse.QUEUED
            if any(copy.touches(storage_address) for copy in self._lost):
                return MemoryUse.UNKNOWN
        return MemoryUse.NONE

    @property
    def num_lost(self) -> int:
        """Copies of which nobody knows whether they ended."""
        return len(self._lost)
