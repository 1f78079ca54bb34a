# SPDX-License-Identifier: Apache-2.0
"""A runtime with real threads that a test can stop at a checkpoint, watch while they wait, and count locks of."""

import threading
from collections import Counter
from contextlib import contextmanager, nullcontext

from omni_core.runtime import ThreadingRuntime

PATIENCE_S = 30.0
"""How long anything that must happen is waited for; reached only by a test that fails."""


class TrackedLock:
    """A lock that knows, per thread, whether it is held."""

    def __init__(self, name, runtime):
        self.name = name
        self.inner = threading.Lock()
        self._runtime = runtime

    def __enter__(self):
        self.inner.acquire()
        self._runtime.note_taken(self.name)
        return True

    def __exit__(self, *exc_info):
        self._runtime.note_left(self.name)
        self.inner.release()


class TrackedCondition:
    """A condition that says who waits on it, and lets a test keep a thread asleep."""

    def __init__(self, lock, name, runtime):
        self.lock = lock
        self.name = name
        self._runtime = runtime
        self._condition = threading.Condition(lock.inner)

    def wait_for(self, predicate, timeout_s):
        thread = threading.current_thread().name

        def may_wake():
            return not self._runtime.is_asleep(thread) and predicate()

        if may_wake():
            return True
        self._runtime.note_waiting(thread, self)
        try:
            return self._condition.wait_for(may_wake, timeout_s)
        finally:
            self._runtime.note_awake(thread)

    def notify_all(self):
        self._condition.notify_all()


class StopPoint:
    """A checkpoint that no thread passes while the test holds it."""

    def __init__(self, runtime, name):
        self._runtime = runtime
        self.name = name

    def wait_reached(self, count=1):
        """Until `count` threads stand here."""
        self._runtime.wait_standing(self.name, count)

    def open(self):
        """Let everyone pass from now on; the end of the block does the same."""
        self._runtime.open(self)


class Call:
    """A call running on its own thread."""

    def __init__(self, runtime, name, function):
        self._function = function
        self._result = None
        self._error = None
        self.name = name
        self._handle = runtime.spawn(name, self._run)

    @property
    def done(self):
        return not self._handle.is_alive()

    def result(self, timeout_s=PATIENCE_S):
        """What the call returned; raises what it raised."""
        assert self._handle.join(timeout_s), f"{self.name} has not returned after {timeout_s} s"
        if self._error is not None:
            raise self._error
        return self._result

    def _run(self):
        try:
            self._result = self._function()
        except BaseException as error:
            self._error = error


class ControlledRuntime(ThreadingRuntime):
    """Real threads, locks and time; every blocking point and checkpoint is visible to the test."""

    def __init__(self, around_thread=nullcontext):
        """`around_thread()` is entered on each new thread, around its work."""
        self._around_thread = around_thread
        self._monitor = threading.Condition()
        self._stopping = []
        self._standing = Counter()
        self.passed = Counter()
        self._asleep = set()
        self._waiting = {}
        self.waits = []
        self._mine = threading.local()
        self.lock_entries = Counter()
        self.handles = []

    # -- the seam

    def lock(self, name):
        return TrackedLock(name, self)

    def condition(self, lock, name):
        return TrackedCondition(lock, name, self)

    def spawn(self, name, target):
        def run():
            with self._around_thread():
                target()

        handle = super().spawn(name, run)
        self.handles.append(handle)
        return handle

    def checkpoint(self, name):
        with self._monitor:
            self._standing[name] += 1
            self._monitor.notify_all()
            opened = self._monitor.wait_for(lambda: all(point.name != name for point in self._stopping), PATIENCE_S)
            self._standing[name] -= 1
            self.passed[name] += 1
            self._monitor.notify_all()
        assert opened, f"checkpoint {name!r} was never opened again"

    # -- control

    @contextmanager
    def stop_at(self, name):
        """No thread passes checkpoint `name` until the block ends."""
        point = StopPoint(self, name)
        with self._monitor:
            self._stopping.append(point)
        try:
            yield point
        finally:
            self.open(point)

    def open(self, point):
        with self._monitor:
            if point in self._stopping:
                self._stopping.remove(point)
            self._monitor.notify_all()

    def wait_standing(self, name, count):
        with self._monitor:
            reached = self._monitor.wait_for(lambda: self._standing[name] >= count, PATIENCE_S)
        assert reached, f"no thread came to checkpoint {name!r}"

    def wait_passed(self, name, count):
        """Until checkpoint `name` was passed `count` times in all."""
        with self._monitor:
            reached = self._monitor.wait_for(lambda: self.passed[name] >= count, PATIENCE_S)
        assert reached, f"checkpoint {name!r} was passed {self.passed[name]} times, not {count}"

    def wait_until_waiting(self, thread, on=""):
        """Until the thread of that name sleeps on a condition, one whose name contains `on`."""

        def sleeps():
            condition = self._waiting.get(thread)
            return condition is not None and on in condition.name

        with self._monitor:
            reached = self._monitor.wait_for(sleeps, PATIENCE_S)
        assert reached, f"thread {thread!r} never waited for {on or 'anything'}"

    def comes_true(self, predicate):
        """Whether `predicate()` holds, now or when some thread has next gone to sleep; looked at again each time."""
        while True:
            with self._monitor:
                seen = len(self.waits)
            if predicate():
                return True
            with self._monitor:
                if not self._monitor.wait_for(lambda seen=seen: len(self.waits) > seen, PATIENCE_S):
                    return False

    @contextmanager
    def keep_asleep(self, thread):
        """Whatever wakes this thread, it does not notice before the block ends."""
        with self._monitor:
            self._asleep.add(thread)
        try:
            yield
        finally:
            with self._monitor:
                self._asleep.discard(thread)
                condition = self._waiting.get(thread)
            if condition is not None:
                with condition.lock.inner:
                    condition.notify_all()

    def call(self, name, function):
        """Run `function` on a thread of that name."""
        return Call(self, name, function)

    def living_threads(self):
        return sorted(handle.name for handle in self.handles if handle.is_alive())

    def holds(self, lock_name):
        """Whether the calling thread holds the lock of that name."""
        return lock_name in getattr(self._mine, "held", ())

    # -- notes of the tracked objects

    def note_taken(self, name):
        held = getattr(self._mine, "held", None)
        if held is None:
            held = self._mine.held = []
        held.append(name)
        self.lock_entries[name] += 1

    def note_left(self, name):
        self._mine.held.remove(name)

    def is_asleep(self, thread):
        return thread in self._asleep

    def note_waiting(self, thread, condition):
        with self._monitor:
            self._waiting[thread] = condition
            self.waits.append((thread, condition.name))
            self._monitor.notify_all()

    def note_awake(self, thread):
        with self._monitor:
            self._waiting.pop(thread, None)
