# SPDX-License-Identifier: Apache-2.0
"""The one lock of the cache, the conditions on it, and the failure and closing flags every waiter looks at."""

from __future__ import annotations

from collections.abc import Callable

from omni_core.prefix_cache.errors import CacheClosedError, CacheFailedError, OmniPrefixCacheError
from omni_core.runtime import Runtime


class CacheState:
    """Shared by manager and controller. Everything but the constructor needs `lock` held.

    The lock covers tables only: whoever holds it waits for nothing, copies nothing, runs no torch operation and
    allocates no tensor.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.lock = runtime.lock("prefix-cache")
        self.committer_work = runtime.condition(self.lock, "committer-work")
        self.prefetch_work = runtime.condition(self.lock, "prefetch-work")
        self.progress = runtime.condition(self.lock, "progress")
        self.failure: BaseException | None = None
        self.closing = False
        self.page_users = 0
        """Threads that read or write staging pages right now; `close` waits for them."""
        self.epoch = 0
        """How often the cache was reset: whoever waited across a reset waited for something that is gone."""

    @property
    def usable(self) -> bool:
        """No write has failed and nobody has closed the cache."""
        return self.failure is None and not self.closing

    def problem(self, what: str) -> OmniPrefixCacheError | None:
        """Why `what` cannot be done, to be raised once the lock is free.

        Returns:
            `CacheClosedError` after `close`; `CacheFailedError`, with the first failure as its cause, after a failed
            write; `None` on a usable cache.
        """
        if self.closing:
            return CacheClosedError(f"{what}: the cache is closed")
        if self.failure is None:
            return None
        error = CacheFailedError(
            f"{what}: a write into the pool failed ({self.failure!r}); call reset() to go on with an empty cache"
        )
        error.__cause__ = self.failure
        return error

    def enter_pages(self) -> None:
        """The calling thread begins to use staging pages without the lock."""
        self.page_users += 1

    def leave_pages(self) -> None:
        """It is done with them."""
        self.page_users -= 1
        self.progress.notify_all()
        if self.closing:
            self.committer_work.notify_all()

    def fail(self, cause: BaseException) -> None:
        """Record the first failure and wake every waiter, which then finds the record."""
        if self.failure is None:
            self.failure = cause
        self.wake_all()

    def wake_all(self) -> None:
        """Wake every thread that waits on any condition."""
        self.committer_work.notify_all()
        self.prefetch_work.notify_all()
        self.progress.notify_all()

    def wait(self, predicate: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until `predicate` holds, or the cache is unusable or was reset; returns whether it did not time out."""
        epoch = self.epoch
        return self.progress.wait_for(
            lambda: predicate() or not self.usable or self.epoch != epoch,
            timeout_s,
        )
