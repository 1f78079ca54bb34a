# SPDX-License-Identifier: Apache-2.0
"""A look inside a simulated device: told of every copy, event and allocation, before or after it happens.

A backend that can tell takes an observer as an option; a real device cannot. Checkers watch through it, and faults are
put in through it: what a method raises is raised in place of what it was told of.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from omni_core.backend.base import Event


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes `[start, stop)` of the process's memory."""

    start: int
    stop: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> ByteRange:
        """From the first to the last byte of a tensor's elements, whatever lies between them."""
        start = tensor.data_ptr()
        if tensor.numel() == 0:
            return cls(start, start)
        elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return cls(start, start + elements * tensor.element_size())

    @property
    def nbytes(self) -> int:
        """How many bytes."""
        return self.stop - self.start

    def overlaps(self, other: ByteRange) -> bool:
        """Whether a byte is in both."""
        return self.start < other.stop and other.start < self.stop

    def __str__(self) -> str:
        return f"{self.nbytes} bytes at {self.start:#x}"


@dataclass(frozen=True, slots=True, eq=False)
class ObservedCopy:
    """One queued copy. Compared by identity."""

    number: int
    """Copies of the stream queued before it."""
    stream: str
    source: ByteRange
    destination: ByteRange

    def __str__(self) -> str:
        return f"copy {self.number} of stream {self.stream!r} ({self.destination.nbytes} bytes)"


class DeviceObserver:
    """Hears what a simulated device does. Every method does nothing; override what you want to know.

    Methods are called on the thread that acts, with no lock of the backend held unless they say so.
    """

    def thread_bound(self) -> None:
        """`bind_thread` was called. Raise to let the device be lost to the thread."""

    def arena_wanted(self, nbytes: int) -> None:
        """`pinned_arena` is about to allocate. Raise `MemoryError` to refuse."""

    def ring_wanted(self, nbytes: int) -> None:
        """`snapshot_ring` is about to allocate so many bytes in all. Raise `MemoryError` to refuse."""

    def arena_made(self, memory: ByteRange) -> None:
        """A pinned arena lies there."""

    def arena_closed(self, memory: ByteRange) -> None:
        """That arena is gone."""

    def copy_queued(self, copy: ObservedCopy) -> None:
        """A copy was queued and may begin from now on. The stream's lock is held: do not wait."""

    def copy_begins(self, copy: ObservedCopy) -> None:
        """A stream's worker takes a copy up. May wait on the runtime; raise an `Exception` to make the copy fail."""

    def part_moved(self, copy: ObservedCopy, moved_bytes: int) -> None:
        """The first `moved_bytes` of the copy have moved."""

    def copy_ended(self, copy: ObservedCopy, failure: Exception | None) -> None:
        """The copy is complete or has failed; nobody who waits for it knows yet."""

    def event_recorded(self, event: Event) -> None:
        """An event was recorded. The stream's lock is held: do not wait."""

    def event_queried(self, event: Event) -> None:
        """The calling thread asks whether an event is complete."""

    def event_waited(self, event: Event, waiter: str) -> None:
        """Someone is about to wait for an event. Raise to let the wait fail.

        Args:
            event: what is waited for.
            waiter: the stream that will wait; empty: the calling thread does.
        """
