# SPDX-License-Identifier: Apache-2.0
"""Keeps the order in which the builder hears of steps and news, where a step has to wait for its tokens.

The engine goes on before a step's sampled tokens are known: the next step's news, which may say that a request of the
waiting step has ended, must not overtake it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from omni_core.runtime import Runtime

Action = Callable[[], None]


class Held:
    """The place of a step that waits. Only the outbox it belongs to looks inside."""

    __slots__ = ("action",)

    def __init__(self, action: Action | None = None) -> None:
        self.action = action


class Outbox:
    """A queue of actions, each done as soon as none waits in front of it. Any thread.

    Actions run under the outbox's lock, one at a time and in order, so they must wait for nothing. One that raises is
    done; the error reaches whoever let it run.
    """

    def __init__(self, runtime: Runtime) -> None:
        """Start empty."""
        self._lock = runtime.lock("outbox")
        self._queue: deque[Held] = deque()
        self._num_held = 0

    @property
    def num_held(self) -> int:
        """Steps that wait for their tokens."""
        return self._num_held

    def put(self, action: Action) -> None:
        """Do this now, or when nothing waits in front of it any more."""
        with self._lock:
            self._queue.append(Held(action))
            self._run_ready()

    def hold(self) -> Held:
        """Keep a place for an action that comes later: `release` it once."""
        held = Held()
        with self._lock:
            self._queue.append(held)
            self._num_held += 1
        return held

    def release(self, held: Held, action: Action) -> None:
        """What was waited for is there. A place that was cleared, or released before, stays as it is."""
        with self._lock:
            if held.action is None and held in self._queue:
                held.action = action
                self._num_held -= 1
                self._run_ready()

    def clear(self) -> None:
        """Forget everything that waits, and do none of it."""
        with self._lock:
            self._queue.clear()
            self._num_held = 0

    def _run_ready(self) -> None:
        while self._queue:
            action = self._queue[0].action
            if action is None:
                return
            self._queue.popleft()
            action()
