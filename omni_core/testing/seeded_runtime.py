# SPDX-License-Identifier: Apache-2.0
"""A runtime of which one thread runs at a time, on virtual time, in an order that a seed decides.

A seed is a schedule: the same seed runs the same threads through the same points in the same order, also in another
process. So a race is found by trying seeds, a deadlock is named instead of hanging, a time-out costs nothing, and a
failure can be run again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import TracebackType
from typing import Self

from omni_core.runtime import Condition, Lock, Runtime, ThreadHandle
from omni_core.testing.schedule_strategies import Strategy, draw_strategy
from omni_core.testing.schedule_trace import ScheduleTrace
from omni_core.testing.seeded_errors import MisuseError, UncleanThreadsError
from omni_core.testing.seeded_locks import SeededCondition, SeededHandle, SeededLock
from omni_core.testing.seeded_scheduler import Scheduler


class SeededRuntime(Runtime):
    """One thread at a time, virtual time, and a seed that decides who goes next at every point.

    The thread that makes the runtime is the engine thread, and the only one besides spawned ones that may use it. As a
    context manager it ends what is left over when the block ends, and says so.

    Args:
        seed: decides every choice.
        strategy: how to choose; default: the one `draw_strategy(seed)` gives.
        around_thread: `around_thread()` is entered on each spawned thread around its work, and on the engine thread
            for the `with` block.
        max_points: points (choices or not) a run may pass.
        stall_limit_s: most virtual seconds that may pass at once while every thread waits. Below the time-outs of what
            runs, it turns a lost wake-up into a `StalledError` that names every thread.
    """

    def __init__(
        self,
        seed: int,
        *,
        strategy: Strategy | None = None,
        around_thread: Callable[[], AbstractContextManager[object]] = nullcontext,
        max_points: int = 5_000_000,
        stall_limit_s: float = float("inf"),
    ) -> None:
        self.seed = seed
        self.strategy = draw_strategy(seed) if strategy is None else strategy
        self._around_thread = around_thread
        self._scheduler = Scheduler(self.strategy, max_points, stall_limit_s)
        self._handles: list[SeededHandle] = []
        self._engine_stack = ExitStack()

    def __enter__(self) -> Self:
        self._engine_stack.enter_context(self._around_thread())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._engine_stack.close()
        unclean = self.close()
        if not unclean:
            return
        if error is not None:
            error.add_note(unclean)
            return
        raise UncleanThreadsError(f"seed {self.seed}: {unclean}")

    # -- the seam

    def lock(self, name: str) -> Lock:
        return SeededLock(self._scheduler, name)

    def condition(self, lock: Lock, name: str) -> Condition:
        if not isinstance(lock, SeededLock):
            raise TypeError(f"condition {name!r} needs a lock of SeededRuntime.lock(), got {type(lock).__name__}")
        return SeededCondition(self._scheduler, lock, name)

    def spawn(self, name: str, target: Callable[[], None]) -> ThreadHandle:
        if self._scheduler.closed:
            raise MisuseError(f"spawn({name!r}): the seeded runtime is closed")

        def run() -> None:
            with self._around_thread():
                target()

        handle = SeededHandle(self._scheduler, self._scheduler.add(name), run)
        self._handles.append(handle)
        self._scheduler.pause(f"start {name}")
        return handle

    def monotonic_s(self) -> float:
        return self._scheduler.now_s

    def sleep(self, seconds: float) -> None:
        scheduler = self._scheduler
        if scheduler.closed:
            return
        if seconds > 0:
            scheduler.block(f"{seconds:.6g} s to pass", scheduler.now_s + seconds)
        else:
            scheduler.pause("sleep")

    def checkpoint(self, name: str) -> None:
        if not self._scheduler.closed:
            self._scheduler.running.last_checkpoint = name
            self._scheduler.pause(name)

    # -- for tests

    @property
    def trace(self) -> ScheduleTrace:
        """What was chosen so far."""
        return self._scheduler.trace

    @property
    def num_points(self) -> int:
        """Points passed so far, whether or not there was a choice."""
        return self._scheduler.num_points

    @property
    def thread_errors(self) -> dict[str, BaseException]:
        """Threads that died of an exception, by name."""
        return {thread.name: thread.error for thread in self._scheduler.threads if thread.error is not None}

    @property
    def living_threads(self) -> tuple[str, ...]:
        """Spawned threads that have not ended, in the order they were started."""
        return tuple(handle.name for handle in self._handles if handle.is_alive())

    def describe(self) -> str:
        """Every living thread, what it waits for and which locks it holds, a line each."""
        return self._scheduler.describe()

    def close(self) -> str:
        """End what is left. Engine thread. Idempotent; afterwards locks are free and no thread can be started.

        Threads that can run first run until they end or wait; a thread that still waits is ended where it waits.

        Returns:
            What was not clean, in words: threads left over, and threads that died. Empty if all is well.
        """
        scheduler = self._scheduler
        if scheduler.closed:
            return ""
        scheduler.let_others_finish()
        waiting = [thread for thread in scheduler.threads[1:] if not thread.ended]
        left_over = [str(thread) for thread in waiting]
        stuck = [thread.name for thread in waiting if not scheduler.kill(thread)]
        scheduler.closed = True
        stuck += [handle.name for handle in self._handles if not handle.is_alive() and not handle.leave_os()]
        said = [f"left over: {thread}" for thread in left_over]
        said += [f"thread {name!r} cannot be ended" for name in stuck]
        said += [f"thread {name!r} died of {error!r}" for name, error in self.thread_errors.items()]
        return "\n".join(said)
