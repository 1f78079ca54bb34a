# SPDX-License-Identifier: Apache-2.0
"""The operating system's threads as the testing runtimes need them: a baton, an identity, values per thread.

With `omni_core.runtime` the only module that imports `threading`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

current_ident = threading.get_ident
"""A number no other living thread has."""

ThreadLocal = threading.local
"""Attributes that each thread sees its own values of."""


Mutex = threading.Lock
"""For the books of a test itself, which must not be points of the schedule it watches. Hold it over nothing else."""


class Baton:
    """Whoever waits for it goes on once another thread has given it; a turn that was given is never lost."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def give(self) -> None:
        """Let the owner of the baton go on. Never blocks."""
        self._lock.release()

    def wait(self, timeout_s: float = -1.0) -> bool:
        """Block the owner until the baton is given; -1: without bound. Returns whether it was given."""
        return self._lock.acquire(timeout=timeout_s)


class OsThread:
    """A started thread that never keeps the process alive."""

    __slots__ = ("_thread",)

    def __init__(self, name: str, target: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=target, name=name, daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` of real time; returns whether the thread has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()
