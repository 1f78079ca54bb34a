# SPDX-License-Identifier: Apache-2.0
"""Locks, conditions and thread handles of a seeded runtime: where its threads wait."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from omni_core.testing.os_threads import OsThread
from omni_core.testing.seeded_errors import DeadlockError, MisuseError
from omni_core.testing.seeded_scheduler import Scheduler
from omni_core.testing.seeded_thread import OwnedLock, SeededThread

_REAL_END_S = 10.0
"""Real time that an ended thread gets to leave the operating system."""


class SeededLock:
    """A lock whose every entry and exit is a point. Not reentrant."""

    __slots__ = ("_enter_point", "_leave_point", "_scheduler", "_waiting", "name", "owner")

    def __init__(self, scheduler: Scheduler, name: str) -> None:
        self._scheduler = scheduler
        self._enter_point = f"enter {name}"
        self._leave_point = f"leave {name}"
        self._waiting: list[SeededThread] = []
        self.name = name
        self.owner: SeededThread | None = None

    def __enter__(self) -> bool:
        if not self._scheduler.closed:
            self._scheduler.pause(self._enter_point)
            self.take()
        return True

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None, /
    ) -> None:
        scheduler = self._scheduler
        if scheduler.closed:
            return
        if self.owner is not scheduler.running:
            # A wait that was interrupted may not have got the lock back.
            if scheduler.running.interrupted:
                return
            raise MisuseError(f"lock {self.name!r} is left by {scheduler.running.name!r}, which does not hold it")
        self.give_up()
        scheduler.pause(self._leave_point)

    def take(self) -> None:
        """Wait for the lock and own it."""
        scheduler = self._scheduler
        me = scheduler.running
        while self.owner is not None:
            self._refuse_circle(me)
            self._waiting.append(me)
            me.wants = self
            try:
                scheduler.block(f"lock {self.name!r}", None)
            finally:
                me.wants = None
                if me in self._waiting:
                    self._waiting.remove(me)
        me.wants = None
        self.owner = me
        me.held.append(self.name)

    def give_up(self) -> None:
        """Stop owning it; whoever waits for it can run."""
        me = self._scheduler.running
        self.owner = None
        me.held.remove(self.name)
        woken, self._waiting = self._waiting, []
        for thread in woken:
            self._scheduler.wake(thread)

    def queue(self, thread: SeededThread) -> None:
        """Let a waiting thread wait for this lock instead."""
        if self.owner is None:
            self._scheduler.wake(thread)
        else:
            thread.deadline_s = None
            thread.waits_for = f"lock {self.name!r}"
            thread.wants = self
            self._waiting.append(thread)

    def _refuse_circle(self, me: SeededThread) -> None:
        """Tell the engine thread if waiting for this lock would never end, whatever the other threads do."""
        circle = []
        lock: OwnedLock | None = self
        while lock is not None and lock.owner is not None and lock.owner not in circle:
            circle.append(lock.owner)
            lock = lock.owner.wants
        if me in circle:
            scheduler = self._scheduler
            scheduler.fail(
                DeadlockError(
                    f"thread {me.name!r} enters lock {self.name!r}, which is held by {circle[0].name!r} and will never "
                    f"be free:\n{scheduler.describe()}"
                )
            )


class SeededCondition:
    """A condition on a `SeededLock`."""

    __slots__ = ("_lock", "_notify_point", "_scheduler", "_wait_point", "_waiting")

    def __init__(self, scheduler: Scheduler, lock: SeededLock, name: str) -> None:
        self._scheduler = scheduler
        self._lock = lock
        self._wait_point = f"condition {name!r} of lock {lock.name!r}"
        self._notify_point = f"notify {name}"
        self._waiting: list[SeededThread] = []

    def wait_for(self, predicate: Callable[[], bool], timeout_s: float | None) -> bool:
        scheduler, lock = self._scheduler, self._lock
        me = scheduler.running
        if scheduler.closed:
            return predicate()
        self._require_lock("wait_for")
        if predicate():
            return True
        deadline_s = None if timeout_s is None else scheduler.now_s + timeout_s
        while deadline_s is None or deadline_s > scheduler.now_s:
            lock.give_up()
            self._waiting.append(me)
            try:
                scheduler.block(self._wait_point, deadline_s)
            except BaseException:
                if lock.owner is None:
                    lock.take()
                raise
            finally:
                if me in self._waiting:
                    self._waiting.remove(me)
            lock.take()
            if predicate():
                return True
        return False

    def notify_all(self) -> None:
        if self._scheduler.closed:
            return
        self._require_lock("notify_all")
        woken, self._waiting = self._waiting, []
        for thread in woken:
            if thread.blocked:
                self._lock.queue(thread)
        self._scheduler.pause(self._notify_point)

    def _require_lock(self, call: str) -> None:
        if self._lock.owner is not self._scheduler.running and not self._scheduler.running.interrupted:
            raise MisuseError(
                f"{self._wait_point}: {call} by {self._scheduler.running.name!r}, which does not hold the lock"
            )


class SeededHandle:
    """A thread of a seeded runtime."""

    __slots__ = ("_os_thread", "_scheduler", "_thread", "_waiting")

    def __init__(self, scheduler: Scheduler, thread: SeededThread, target: Callable[[], None]) -> None:
        self._scheduler = scheduler
        self._thread = thread
        self._waiting: list[SeededThread] = []
        self._os_thread = OsThread(thread.name, lambda: scheduler.run_thread(thread, target, self._waiting))

    @property
    def name(self) -> str:
        return self._thread.name

    def is_alive(self) -> bool:
        return not self._thread.ended

    def join(self, timeout_s: float) -> bool:
        scheduler = self._scheduler
        if scheduler.closed:
            return self._thread.ended
        me = scheduler.running
        scheduler.pause(f"join {self.name}")
        if not self._thread.ended and timeout_s > 0:
            self._waiting.append(me)
            try:
                scheduler.block(f"thread {self.name!r} to end", scheduler.now_s + timeout_s)
            finally:
                if me in self._waiting:
                    self._waiting.remove(me)
        return self._thread.ended

    def leave_os(self) -> bool:
        """Wait, in real time, for an ended thread to be gone."""
        return self._thread.ended and self._os_thread.join(_REAL_END_S)
