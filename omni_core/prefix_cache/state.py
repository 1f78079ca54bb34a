# SPDX-License-Identifier: Apache-2.0
"""The one lock of the cache, the conditions on it, and the failure and closing flags every waiter looks at."""

from __future__ import annotations

from collections.abc import Callable

from omni_core.prefix_cache.errors import CacheClosedError, CacheFailedError
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

    @property
    def usable(self) -> bool:
        """No write has failed and nobody has closed the cache."""
        return self.failure is None and not self.closing

    def check_usable(self, what: str) -> None:
        """Refuse `what` on a failed or closed cache.

        Raises:
            CacheClosedError: `close` was called.
            CacheFailedError: a write failed; its error is the cause.
        """
        if self.closing:
            raise CacheClosedError(f"{what}: the cache is closed")
        if self.failure is not None:
            raise CacheFailedError(
                f"{what}: a write into the pool failed ({self.failure!r}); call reset() to go on with an empty cache"
            ) from self.failure

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
        """Wait until `predicate` holds or the cache is unusable; returns whether it did not time out."""
        return self.progress.wait_for(lambda: not self.usable or predicate(), timeout_s)
