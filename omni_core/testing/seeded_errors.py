# SPDX-License-Identifier: Apache-2.0
"""How a seeded run says that a schedule went wrong. Raised in the thread that made the runtime."""

from __future__ import annotations


class ScheduleError(RuntimeError):
    """Root of what a seeded runtime itself finds wrong."""


class DeadlockError(ScheduleError):
    """No thread can ever run again, or locks are waited for in a circle; names each thread and what it waits for."""


class StalledError(DeadlockError):
    """Every thread waits, and only a time-out beyond the runtime's `stall_limit_s` would let one go on."""


class PointLimitError(ScheduleError):
    """The run passed more points than allowed: some thread goes round in circles."""


class UncleanThreadsError(ScheduleError):
    """Threads had not ended when the runtime was closed, or had died of an exception; names them."""


class MisuseError(ScheduleError):
    """A call the seeded runtime cannot serve, such as one from a thread it does not know."""


class ThreadKilled(BaseException):
    """Raised in a thread that is left over when its runtime is closed, wherever it waits: the way it is ended."""
