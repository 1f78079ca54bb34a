# SPDX-License-Identifier: Apache-2.0
"""What a test leaves behind: threads that have not ended, and memory of a simulated device that was not given back."""

from __future__ import annotations

from collections.abc import Callable

from omni_core.backend.observer import ByteRange, DeviceObserver
from omni_core.runtime import ThreadHandle, ThreadingRuntime


class LeakError(AssertionError):
    """A test ended and something of its stage is still there. Names it."""


class ThreadKeepingRuntime(ThreadingRuntime):
    """Real threads, of which it knows those that have not ended."""

    def __init__(self) -> None:
        self._handles: list[ThreadHandle] = []

    def spawn(self, name: str, target: Callable[[], None]) -> ThreadHandle:
        handle = super().spawn(name, target)
        self._handles.append(handle)
        return handle

    def alive(self, wait_s: float) -> tuple[str, ...]:
        """Names of the threads that have not ended after `wait_s` of real time each."""
        return tuple(handle.name for handle in self._handles if not handle.join(wait_s))


class OpenArenas(DeviceObserver):
    """Pinned memory that was allocated and not given back."""

    def __init__(self) -> None:
        self._arenas: list[ByteRange] = []

    @property
    def open_bytes(self) -> int:
        """Bytes of the arenas that are open."""
        return sum(arena.nbytes for arena in self._arenas)

    def arena_made(self, memory: ByteRange) -> None:
        self._arenas.append(memory)

    def arena_closed(self, memory: ByteRange) -> None:
        self._arenas.remove(memory)
