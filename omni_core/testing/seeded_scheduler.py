# SPDX-License-Identifier: Apache-2.0
"""One thread at a time: real threads that hand a baton on, on a clock that moves only when none of them can run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from omni_core.testing.os_threads import current_ident
from omni_core.testing.schedule_strategies import Strategy
from omni_core.testing.schedule_trace import ScheduleTrace
from omni_core.testing.seeded_errors import (
    DeadlockError,
    MisuseError,
    PointLimitError,
    StalledError,
    ThreadKilled,
)
from omni_core.testing.seeded_thread import SeededThread

ENGINE_THREAD_NAME = "engine"
"""What the thread that made the runtime is called."""
_INTERRUPT_PATIENCE_S = 5.0
"""Real time an interrupted engine thread waits for its turn before it goes on regardless."""
_MOST_KILLS = 1_000
"""How often one thread is told to end before it is left alone."""


class Scheduler:
    """Decides who runs. Everything here is done by the one thread that runs, so nothing needs a lock.

    Args:
        strategy: chooses.
        max_points: points a run may pass.
        stall_limit_s: most seconds the clock may move at once.
    """

    def __init__(self, strategy: Strategy, max_points: int, stall_limit_s: float) -> None:
        self._strategy = strategy
        self._max_points = max_points
        self._stall_limit_s = stall_limit_s
        self.now_s = 0.0
        self.num_points = 0
        self.trace = ScheduleTrace()
        self.engine = SeededThread(0, ENGINE_THREAD_NAME)
        self.engine.ident = current_ident()
        self.threads = [self.engine]
        self.running = self.engine
        self.closed = False
        self._runnable = [self.engine]
        self._urgent: SeededThread | None = None

    @property
    def runnable(self) -> Sequence[SeededThread]:
        """Threads that could run, the running one included."""
        return self._runnable

    # -- points, for the running thread

    def pause(self, point: str) -> None:
        """A point at which another thread may be chosen to run."""
        me = self.running
        if me.ident != current_ident():
            self._refuse_stranger(point)
        if me.killed:
            self._kill_again(me)
        self._count(point)
        if len(self._runnable) > 1:
            self._go_on_with(self._choose(me, point), me)

    def block(self, what: str, deadline_s: float | None) -> bool:
        """Wait until another thread wakes this one; returns whether the deadline passed first.

        Raises:
            BaseException: whatever another thread, or the scheduler itself, has for this one.
        """
        me = self.running
        if me.ident != current_ident():
            self._refuse_stranger(what)
        if me.killed:
            self._kill_again(me)
        self._count(what)
        me.blocked, me.waits_for, me.deadline_s, me.timed_out = True, what, deadline_s, False
        self._runnable.remove(me)
        self._go_on_with(self._next(me, what), me)
        return me.timed_out

    def wake(self, thread: SeededThread) -> None:
        """Let a thread that waits run again."""
        if thread.blocked:
            thread.blocked = False
            thread.deadline_s = None
            self._runnable.append(thread)

    def interrupt(self, thread: SeededThread, error: BaseException) -> None:
        """Have `error` raised in another thread, which runs next."""
        if thread.pending is None:
            thread.pending = error
        self._urgent = thread
        self.wake(thread)

    def fail(self, error: BaseException) -> None:
        """Have `error` raised in the engine thread, at once."""
        me = self.running
        if me is self.engine:
            raise error
        self.interrupt(self.engine, error)
        self._go_on_with(self.engine, me)

    # -- threads

    def add(self, name: str) -> SeededThread:
        """Enter a thread that is about to be started."""
        thread = SeededThread(len(self.threads), name)
        self.threads.append(thread)
        self._runnable.append(thread)
        return thread

    def run_thread(self, thread: SeededThread, target: Callable[[], None], joiners: Sequence[SeededThread]) -> None:
        """The life of an added thread: wait for its turn, run, hand on. Whatever `target` raises is kept."""
        thread.baton.wait()
        thread.ident = current_ident()
        try:
            self._raise_pending(thread)
            target()
        except ThreadKilled:
            pass
        except BaseException as error:  # told of when the runtime is closed
            thread.error = None if thread.killed else error
        thread.ended = True
        self._runnable.remove(thread)
        for joiner in joiners:
            self.wake(joiner)
        following = self._next(thread, "end")
        self.running = following
        following.baton.give()

    def kill(self, thread: SeededThread) -> bool:
        """End a thread that is left over; engine thread only. Returns whether it has ended."""
        thread.killed = 1
        self.interrupt(thread, ThreadKilled(f"thread {thread.name!r} was left over"))
        self._runnable.remove(self.engine)
        self.engine.blocked, self.engine.waits_for, self.engine.deadline_s = True, f"{thread.name!r} to end", self.now_s
        while not thread.ended and thread.killed <= _MOST_KILLS:
            self._go_on_with(thread, self.engine)
        if not thread.ended:
            self._runnable.remove(thread)
        self.wake(self.engine)
        return thread.ended

    def let_others_finish(self) -> None:
        """Let every other thread run until it ends or waits; engine thread only. No time passes."""
        me = self.engine
        self.wake(me)
        while len(self._runnable) > 1:
            self._runnable.remove(me)
            me.blocked, me.waits_for, me.deadline_s, me.timed_out = True, "the others to finish", self.now_s, False
            self._go_on_with(self._next(me, "close"), me)

    def describe(self) -> str:
        """Every living thread, a line each."""
        return "\n".join(f"  {thread}" for thread in self.threads if not thread.ended)

    # -- the choice

    def _go_on_with(self, following: SeededThread, me: SeededThread) -> None:
        if following is not me:
            self.running = following
            following.baton.give()
            if me is self.engine:
                self._await_engine_turn()
            else:
                me.baton.wait()
        if me.pending is not None:
            self._raise_pending(me)

    def _await_engine_turn(self) -> None:
        me = self.engine
        try:
            me.baton.wait()
        except BaseException as interrupt:  # Ctrl-C or a test's time limit: others run, so our turn comes first
            if me.pending is None:
                me.pending = interrupt
            if not me.baton.wait(_INTERRUPT_PATIENCE_S):
                raise

    def _raise_pending(self, me: SeededThread) -> None:
        error, me.pending = me.pending, None
        if error is not None:
            me.interrupted = True
            raise error

    def _next(self, me: SeededThread, point: str) -> SeededThread:
        """Who runs now that `me` cannot."""
        if not self._runnable:
            self._let_time_pass()
        if len(self._runnable) == 1:
            self._urgent = None
            return self._runnable[0]
        return self._choose(me, point)

    def _choose(self, me: SeededThread, point: str) -> SeededThread:
        candidates = self._runnable
        if self._urgent is not None:
            following, self._urgent = self._urgent, None
            return following
        position = self._strategy.choose(candidates, me, self.trace.num_choices)
        following = candidates[position]
        self.trace.add(candidates, me, following, point)
        return following

    def _let_time_pass(self) -> None:
        waiting = [thread for thread in self.threads if thread.blocked and not thread.ended]
        deadlines = [thread.deadline_s for thread in waiting if thread.deadline_s is not None]
        if not deadlines:
            self.interrupt(self.engine, DeadlockError(f"no thread can run, ever:\n{self.describe()}"))
            return
        until_s = min(deadlines)
        if until_s - self.now_s > self._stall_limit_s:
            error = StalledError(
                f"every thread waits, and none can run before {until_s:.6g} s, which is more than "
                f"stall_limit_s={self._stall_limit_s} after {self.now_s:.6g} s:\n{self.describe()}"
            )
            self.interrupt(self.engine, error)
            return
        self.now_s = max(self.now_s, until_s)
        for thread in waiting:
            if thread.deadline_s is not None and thread.deadline_s <= self.now_s:
                self.wake(thread)
                thread.timed_out = True

    # -- refusals

    def _count(self, point: str) -> None:
        self.num_points += 1
        if self.num_points <= self._max_points:
            return
        # The engine thread needs some points to end the run.
        self._max_points = self.num_points + max(1_000, self._max_points // 10)
        self.fail(
            PointLimitError(
                f"the run passed {self.num_points} points, the last one {point!r} in thread {self.running.name!r}; "
                f"raise max_points, or look for a thread that goes round in circles:\n{self.describe()}"
            )
        )

    def _kill_again(self, me: SeededThread) -> None:
        me.killed += 1
        if me.killed > _MOST_KILLS:
            # It swallows what ends it; nobody gives it the baton again.
            self.running = self.engine
            self.engine.baton.give()
            while True:
                me.baton.wait()
        raise ThreadKilled(f"thread {me.name!r} was left over")

    def _refuse_stranger(self, point: str) -> None:
        raise MisuseError(
            f"{point}: called by a thread this seeded runtime does not know, while {self.running.name!r} runs; start "
            "threads with spawn(), and use the runtime as engine only in the thread that made it"
        )
