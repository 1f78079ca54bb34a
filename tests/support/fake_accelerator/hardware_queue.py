# SPDX-License-Identifier: Apache-2.0
"""Where work waits: in the queue of a stream of the fake hardware, and before that in one of the host."""

import threading
from collections import deque
from contextlib import contextmanager


class Mark:
    """A place in a queue, as a recorded event knows it."""

    def __init__(self):
        self.done = False
        self.failure = None


class HardwareQueue:
    """The work of one stream, done in order by a thread of its own."""

    def __init__(self, machine, device, stream_id):
        self.machine = machine
        self.device = device
        self.stream_id = stream_id
        self.failure = None
        self._work = deque()
        self._busy = False
        self._worker = None

    @property
    def idle(self):
        return not self._work and not self._busy

    def launch(self, item):
        """Machine's lock held."""
        self._work.append(item)
        if self._worker is None:
            self._worker = threading.Thread(target=self._run, name=f"fake-stream-{self.stream_id}", daemon=True)
            self._worker.start()
        self.machine.changed.notify_all()

    def _run(self):
        while True:
            with self.machine.changed:
                self._busy = False
                self.machine.changed.notify_all()
                self.machine.changed.wait_for(lambda: self._work)
                item = self._work.popleft()
                self._busy = True
            item(self)
            del item


class HostTaskQueue:
    """Work of all streams that a thread of the host has still to launch (A1, `TASK_QUEUE_ENABLE`).

    Args:
        changed: the machine's condition.
    """

    def __init__(self, changed):
        self._changed = changed
        self._tasks = deque()
        self._launching = False
        self._held = False
        threading.Thread(target=self._run, name="fake-task-queue", daemon=True).start()

    @property
    def idle(self):
        return not self._tasks and not self._launching

    def put(self, queue, item):
        """Machine's lock held."""
        self._tasks.append((queue, item))
        self._changed.notify_all()

    @contextmanager
    def hold(self):
        """Nothing is launched inside."""
        with self._changed:
            self._held = True
        try:
            yield
        finally:
            with self._changed:
                self._held = False
                self._changed.notify_all()

    def _run(self):
        while True:
            with self._changed:
                self._launching = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._tasks and not self._held)
                queue, item = self._tasks.popleft()
                self._launching = True
                queue.launch(item)
                del queue, item
