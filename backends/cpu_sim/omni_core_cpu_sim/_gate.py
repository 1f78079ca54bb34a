# SPDX-License-Identifier: Apache-2.0
"""Simulator controls: the gate every copy passes, so a test can force a schedule or a failure without sleeping."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from omni_core.backend.errors import BackendError, DeviceWaitTimeoutError
from omni_core.runtime import Runtime


class CopyGate:
    """Holds copies back, lets them through one by one, or makes them fail. No real device has this.

    An immediate copy (`immediate_copy_bytes`) is made only while the gate is open, and does not pass it. A stream's
    worker takes a copy to the gate before it moves a byte. Streams are queues, so at most one copy of each
    stream stands at the gate at a time. Any thread may call; only `wait_until_waiting` blocks.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._lock = runtime.lock("cpu_sim.gate")
        self._changed = runtime.condition(self._lock, "cpu_sim.gate.changed")
        self._holds: set[object] = set()
        self._permits = 0
        self._waiting = 0
        self._admitted = 0
        self._failures: deque[Exception] = deque()
        self._closed = False

    @property
    def held(self) -> bool:
        """Whether copies are held back now."""
        return bool(self._holds)

    @property
    def open(self) -> bool:
        """Whether the next copy passes, and does not fail."""
        return not self._holds and not self._failures

    @property
    def waiting(self) -> int:
        """Copies that stand at the gate now."""
        return self._waiting

    @property
    def admitted(self) -> int:
        """Copies let through since the backend was made, those told to fail included, immediate ones left out."""
        return self._admitted

    @contextmanager
    def hold_copies(self) -> Iterator[None]:
        """Hold back every copy that has not passed the gate yet, until the block ends. Holds nest.

        Raises:
            BackendError: the backend is closed.
        """
        hold = object()
        with self._lock:
            if self._closed:
                raise BackendError("hold_copies: the cpu_sim backend is closed")
            self._holds.add(hold)
        try:
            yield
        finally:
            with self._lock:
                self._holds.discard(hold)
                if not self._holds:
                    self._permits = 0
                self._changed.notify_all()

    def release_copies(self) -> None:
        """End every hold now; blocks that still hold end without further effect."""
        with self._lock:
            self._holds.clear()
            self._permits = 0
            self._changed.notify_all()

    def let_through(self, count: int) -> None:
        """Let the next `count` copies pass although copies are held.

        Raises:
            ValueError: `count` is below 1, or copies are not held.
        """
        with self._lock:
            if count < 1 or not self._holds:
                raise ValueError(
                    f"let_through({count}): count must be at least 1 and copies must be held "
                    f"(holds: {len(self._holds)})"
                )
            self._permits += count
            self._changed.notify_all()

    def fail_next_copy(self, error: Exception) -> None:
        """Make the next copy that passes the gate fail with `error` and move no byte. Calls queue up."""
        with self._lock:
            self._failures.append(error)

    def wait_until_waiting(self, count: int, timeout_s: float) -> None:
        """Block until at least `count` copies stand at the gate.

        Raises:
            DeviceWaitTimeoutError: `timeout_s` passed first.
        """
        with self._lock:
            if not self._changed.wait_for(lambda: self._waiting >= count, timeout_s):
                raise DeviceWaitTimeoutError(
                    f"copy gate: {self._waiting} of {count} copies stand at the gate after {timeout_s} s "
                    f"(held: {bool(self._holds)}); queue a copy on that many streams"
                )

    def admit(self) -> Exception | None:
        """Pass one copy; called by a stream's worker, which this blocks while copies are held.

        Returns:
            The error the copy must fail with, or `None`.
        """
        with self._lock:
            if self._holds and self._permits == 0:
                self._waiting += 1
                self._changed.notify_all()
                self._changed.wait_for(self._may_pass, None)
                self._waiting -= 1
            if self._permits > 0:
                self._permits -= 1
            self._admitted += 1
            return self._failures.popleft() if self._failures else None

    def close(self) -> None:
        """End every hold for good. Idempotent."""
        with self._lock:
            self._closed = True
            self._holds.clear()
            self._permits = 0
            self._changed.notify_all()

    def _may_pass(self) -> bool:
        return not self._holds or self._permits > 0
