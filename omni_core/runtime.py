# SPDX-License-Identifier: Apache-2.0
"""The one seam all concurrency goes through: threads, locks, conditions and the clock.

Nothing else in this project imports `threading` or reads a clock to decide what happens next. Production uses
`ThreadingRuntime`; a test may hand in another `Runtime` that runs one thread at a time, owns the time, and chooses who
goes next at every blocking point and every `checkpoint`.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Protocol


class Lock(Protocol):
    """A mutual-exclusion lock, used only as a context manager. Not reentrant."""

    def __enter__(self) -> bool: ...

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...


class Condition(Protocol):
    """A condition variable bound to a `Lock`. Every method must be called with that lock held."""

    def wait_for(self, predicate: Callable[[], bool], timeout_s: float | None) -> bool:
        """Release the lock, sleep until `predicate()` holds or `timeout_s` passed, take the lock again.

        Returns the last value of the predicate. `None` waits without bound and is for the idle loops of our own
        helper threads only, which `close()` wakes; no caller's thread may use it.
        """
        ...

    def notify_all(self) -> None:
        """Wake every waiter; each re-checks its own predicate."""
        ...


class ThreadHandle(Protocol):
    """A started thread."""

    @property
    def name(self) -> str: ...

    def is_alive(self) -> bool: ...

    def join(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s`; returns whether the thread has ended."""
        ...


class Runtime(ABC):
    """Makes every thread, lock, condition and time stamp of the library."""

    @abstractmethod
    def lock(self, name: str) -> Lock:
        """Make a lock; `name` appears in diagnostics."""

    @abstractmethod
    def condition(self, lock: Lock, name: str) -> Condition:
        """Make a condition bound to `lock`, which must come from this runtime."""

    @abstractmethod
    def spawn(self, name: str, target: Callable[[], None]) -> ThreadHandle:
        """Start a thread that never keeps the process alive."""

    @abstractmethod
    def monotonic_s(self) -> float:
        """Seconds on a clock that never goes back."""

    @abstractmethod
    def sleep(self, seconds: float) -> None:
        """Let `seconds` pass for the calling thread."""

    @abstractmethod
    def checkpoint(self, name: str) -> None:
        """Mark a point where another thread may be chosen to run. Does nothing in production."""


class _ThreadingCondition:
    def __init__(self, lock: threading.Lock) -> None:
        self._condition = threading.Condition(lock)

    def wait_for(self, predicate: Callable[[], bool], timeout_s: float | None) -> bool:
        return self._condition.wait_for(predicate, timeout_s)

    def notify_all(self) -> None:
        self._condition.notify_all()


class _ThreadingHandle:
    def __init__(self, thread: threading.Thread) -> None:
        self._thread = thread

    @property
    def name(self) -> str:
        return self._thread.name

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def join(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()


class ThreadingRuntime(Runtime):
    """The production runtime: `threading` and the monotonic clock, nothing added."""

    def lock(self, name: str) -> Lock:
        return threading.Lock()

    def condition(self, lock: Lock, name: str) -> Condition:
        if not isinstance(lock, type(threading.Lock())):
            raise TypeError(f"condition {name!r} needs a lock of ThreadingRuntime.lock(), got {type(lock).__name__}")
        return _ThreadingCondition(lock)

    def spawn(self, name: str, target: Callable[[], None]) -> ThreadHandle:
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        return _ThreadingHandle(thread)

    def monotonic_s(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def checkpoint(self, name: str) -> None:
        return None
