# SPDX-License-Identifier: Apache-2.0
"""Threads of a benchmark: a runtime that can say what each thread's CPU time is, and builders that materialise."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

from omni_core.cli.bench.stage import Stage
from omni_core.runtime import ThreadHandle, ThreadingRuntime

COMMITTER = "omni-core-committer"
_PROC = Path("/proc")
_LIMIT_S = 120.0
_ASLEEP_AFTER_S = 0.0005
"""Within this a thread that has nothing left to do is off the processor."""


class MeteredRuntime(ThreadingRuntime):
    """The production runtime; it remembers which thread is which."""

    def __init__(self) -> None:
        self._threads: dict[str, str] = {}

    def spawn(self, name: str, target: Callable[[], None]) -> ThreadHandle:
        def noted() -> None:
            self._threads[name] = os.readlink(_PROC / "thread-self")
            target()

        return super().spawn(name, noted)

    def cpu_s(self, name: str) -> float:
        """CPU time of a living thread so far, by the kernel's account.

        Raises:
            KeyError: no such thread was started.
            OSError: the kernel keeps no such account, or the thread has ended.
        """
        nanoseconds = (_PROC / self._threads[name] / "schedstat").read_text(encoding="utf-8").split()[0]
        return int(nanoseconds) / 1e9


class Sleepers:
    """Threads that do nothing but wait to be woken, as a copy's and the committer's do between steps."""

    def __init__(self, runtime: ThreadingRuntime, count: int) -> None:
        self._runtime = runtime
        self._locks = [runtime.lock(f"bench-sleeper-{index}") for index in range(count)]
        self._conditions = [runtime.condition(lock, "bench-sleeper") for lock in self._locks]
        self._asked = [0] * count
        self._woken = [0] * count
        self._closing = False
        self._threads = [runtime.spawn(f"bench-sleeper-{index}", partial(self._run, index)) for index in range(count)]

    def wake(self) -> None:
        """Wake each of them; returns at once."""
        for index, lock in enumerate(self._locks):
            with lock:
                self._asked[index] += 1
                self._conditions[index].notify_all()

    def settle(self) -> None:
        """Wait until all of them have run and sleep again.

        Raises:
            RuntimeError: one has not run.
        """
        for index, lock in enumerate(self._locks):
            with lock:
                if not self._conditions[index].wait_for(partial(self._has_run, index), _LIMIT_S):
                    raise RuntimeError(f"thread {index} of the benchmark has not run within {_LIMIT_S:g} s")
        self._runtime.sleep(_ASLEEP_AFTER_S)

    def close(self) -> None:
        """End the threads."""
        self._closing = True
        self.wake()
        for thread in self._threads:
            thread.join(_LIMIT_S)

    def _has_run(self, index: int) -> bool:
        return self._woken[index] == self._asked[index]

    def _run(self, index: int) -> None:
        while not self._closing:
            with self._locks[index]:
                self._conditions[index].wait_for(lambda: not self._has_run(index), None)
                self._woken[index] = self._asked[index]
                self._conditions[index].notify_all()


class Builders:
    """Threads that materialise saved steps, as an engine's output builder does, and release the rows at once."""

    def __init__(self, runtime: ThreadingRuntime, stage: Stage, count: int = 1) -> None:
        self._stage = stage
        self._lock = runtime.lock("bench-builders")
        self._changed = runtime.condition(self._lock, "bench-builders")
        self._saved: deque[int] = deque()
        self._open = 0
        self._closing = False
        self._error: BaseException | None = None
        self.delivered_s: list[float] = []
        """What each `materialize` took, `release` included, while the engine thread went on."""
        self._threads = [runtime.spawn(f"bench-builder-{index}", self._run) for index in range(count)]

    def submit(self, step_id: int) -> None:
        """Hand a saved step over. Never blocks."""
        with self._lock:
            self._saved.append(step_id)
            self._open += 1
            self._changed.notify_all()

    def wait_for_open(self, at_most: int) -> bool:
        """Wait until no more than so many steps are open; returns whether it had to wait.

        Raises:
            RuntimeError: a builder failed, or the steps are not taken.
        """
        with self._lock:
            waits = self._open > at_most
            done = self._changed.wait_for(lambda: self._open <= at_most or self._error is not None, _LIMIT_S)
        if self._error is not None:
            raise RuntimeError("a builder of the benchmark failed") from self._error
        if not done:
            raise RuntimeError(f"{self._open} steps were still open after {_LIMIT_S:g} s")
        return waits

    def close(self) -> None:
        """End the threads."""
        with self._lock:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(_LIMIT_S)

    def _run(self) -> None:
        while True:
            with self._lock:
                self._changed.wait_for(lambda: bool(self._saved) or self._closing, None)
                if not self._saved:
                    return
                step_id = self._saved.popleft()
            try:
                began = time.perf_counter()
                self._stage.deliver(step_id).release()
                self.delivered_s.append(time.perf_counter() - began)
            except Exception as error:  # to the engine thread, which stops the benchmark
                self._error = error
            with self._lock:
                self._open -= 1
                self._changed.notify_all()
