# SPDX-License-Identifier: Apache-2.0
"""A runtime around any other that knows, per thread, its last checkpoint, the locks it holds, and when it may wait."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

from omni_core.runtime import Condition, Lock, Runtime, ThreadHandle
from omni_core.testing.os_threads import ThreadLocal, current_ident


@dataclass(slots=True, eq=False)
class WatchedThread:
    """What is known of one thread. Changed by that thread only."""

    name: str
    last_checkpoint: str = ""
    held: list[str] = field(default_factory=list)
    """Names of the locks it holds, oldest first."""

    def where(self) -> str:
        """The thread and the last checkpoint it passed, in words."""
        after = f" after {self.last_checkpoint!r}" if self.last_checkpoint else ""
        return f"thread {self.name!r}{after}"


class WaitListener(Protocol):
    """Hears of everything a thread could have to wait for, before it does."""

    def may_wait(self, thread: WatchedThread, what: str) -> None:
        """The thread is about to do something it may have to wait for, holding `thread.held`."""


class _ThisThread(ThreadLocal):
    watched: WatchedThread | None = None


class WatchedRuntime(Runtime):
    """Passes everything on to another runtime, and tells.

    Args:
        inner: makes the threads, locks and waits.
        listener: told of waits.
        around_thread: entered on each spawned thread around its work.
    """

    def __init__(
        self,
        inner: Runtime,
        listener: WaitListener,
        around_thread: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._inner = inner
        self._listener = listener
        self._around_thread = around_thread
        self._mine = _ThisThread()

    @property
    def this_thread(self) -> WatchedThread:
        """The calling thread. One that was not spawned here is named by its number."""
        watched = self._mine.watched
        if watched is None:
            watched = self._mine.watched = WatchedThread(f"thread {current_ident()}")
        return watched

    def adopt(self, name: str) -> None:
        """Give the calling thread a name."""
        self.this_thread.name = name

    def lock(self, name: str) -> Lock:
        return _WatchedLock(self, self._inner.lock(name), name)

    def condition(self, lock: Lock, name: str) -> Condition:
        if not isinstance(lock, _WatchedLock):
            raise TypeError(f"condition {name!r} needs a lock of WatchedRuntime.lock(), got {type(lock).__name__}")
        return _WatchedCondition(self, self._inner.condition(lock.inner, name), lock.name, name)

    def spawn(self, name: str, target: Callable[[], None]) -> ThreadHandle:
        self.tell_wait(f"starts thread {name!r}")

        def run() -> None:
            self.adopt(name)
            with self._around_thread():
                target()

        return _WatchedHandle(self, self._inner.spawn(name, run))

    def monotonic_s(self) -> float:
        return self._inner.monotonic_s()

    def sleep(self, seconds: float) -> None:
        self.tell_wait(f"sleeps {seconds:.6g} s")
        self._inner.sleep(seconds)

    def checkpoint(self, name: str) -> None:
        self.this_thread.last_checkpoint = name
        self._inner.checkpoint(name)

    def tell_wait(self, what: str) -> None:
        """The calling thread may have to wait now."""
        thread = self.this_thread
        if thread.held:
            self._listener.may_wait(thread, what)


class _WatchedLock:
    __slots__ = ("_runtime", "inner", "name")

    def __init__(self, runtime: WatchedRuntime, inner: Lock, name: str) -> None:
        self._runtime = runtime
        self.inner = inner
        self.name = name

    def __enter__(self) -> bool:
        self._runtime.tell_wait(f"enters lock {self.name!r}")
        entered = self.inner.__enter__()
        self._runtime.this_thread.held.append(self.name)
        return entered

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None, /
    ) -> None:
        self._runtime.this_thread.held.remove(self.name)
        self.inner.__exit__(exc_type, exc, traceback)


class _WatchedCondition:
    __slots__ = ("_inner", "_lock_name", "_name", "_runtime")

    def __init__(self, runtime: WatchedRuntime, inner: Condition, lock_name: str, name: str) -> None:
        self._runtime = runtime
        self._inner = inner
        self._lock_name = lock_name
        self._name = name

    def wait_for(self, predicate: Callable[[], bool], timeout_s: float | None) -> bool:
        held = self._runtime.this_thread.held
        held.remove(self._lock_name)
        try:
            self._runtime.tell_wait(f"waits for condition {self._name!r}")
            return self._inner.wait_for(predicate, timeout_s)
        finally:
            held.append(self._lock_name)

    def notify_all(self) -> None:
        self._inner.notify_all()


class _WatchedHandle:
    __slots__ = ("_inner", "_runtime")

    def __init__(self, runtime: WatchedRuntime, inner: ThreadHandle) -> None:
        self._runtime = runtime
        self._inner = inner

    @property
    def name(self) -> str:
        return self._inner.name

    def is_alive(self) -> bool:
        return self._inner.is_alive()

    def join(self, timeout_s: float) -> bool:
        self._runtime.tell_wait(f"joins thread {self.name!r}")
        return self._inner.join(timeout_s)
