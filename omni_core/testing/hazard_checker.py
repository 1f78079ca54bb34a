# SPDX-License-Identifier: Apache-2.0
"""Watches a cache, its backend and its threads, and names both sides of every access that was only lucky to be right.

    with SeededRuntime(seed) as seeded, HazardChecker(seeded) as checker:
        backend = create_backend("cpu_sim", runtime=checker.runtime, options={"observer": checker.device})
        cache = OmniPrefixCacheManager(config, backend, layout, runtime=checker.runtime, device=device)
        engine = MyEngine(checker.watch_cache(cache))

The exit of the block raises `HazardError` if anything was found. On real threads it sees less: what happens to overlap.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from omni_core.backend.observer import DeviceObserver
from omni_core.runtime import Runtime
from omni_core.testing.copy_watch import CopyWatch
from omni_core.testing.hazards import Hazard, HazardError, HazardKind, HazardSide
from omni_core.testing.memory_accesses import AccessWatch, TorchAccess
from omni_core.testing.os_threads import Mutex
from omni_core.testing.stage_cache import StageCache
from omni_core.testing.staging_watch import StagingWatch
from omni_core.testing.watched_cache import WatchedCache
from omni_core.testing.watched_runtime import WatchedRuntime, WatchedThread

STATE_LOCK = "prefix-cache"
"""The lock whose holder may not wait, allocate or run a torch operation."""
WRITER_THREAD = "omni-core-committer"
"""The thread that brings staged rows into the pool."""
_MOST_HAZARDS = 20


class HazardChecker:
    """The checker. As a context manager it also watches the thread that enters it, and raises what was found.

    Args:
        runtime: the runtime to watch, seeded or real. Watching adds no point to a seeded schedule.
        state_lock: name of the lock that covers tables only.
        writer_thread: name of the thread that writes the pool.
    """

    def __init__(self, runtime: Runtime, *, state_lock: str = STATE_LOCK, writer_thread: str = WRITER_THREAD) -> None:
        self.hazards: list[Hazard] = []
        self.num_accesses = 0
        """Torch operations looked at."""
        self.runtime = WatchedRuntime(runtime, self, lambda: AccessWatch(self))
        """The runtime to build backend and cache with."""
        self._state_lock = state_lock
        self._mutex = Mutex()
        self._staging = StagingWatch(self._found, writer_thread)
        self._copies = CopyWatch(self._found, self._this_thread, self._staging, self._mutex, self._may_allocate)
        self._engine_watch = AccessWatch(self)

    @property
    def device(self) -> DeviceObserver:
        """The observer to build the backend with."""
        return self._copies

    def watch_cache(self, cache: StageCache, *, stores_hidden: bool = True) -> StageCache:
        """The cache to run steps through.

        Args:
            cache: the cache.
            stores_hidden: whether hidden rows of a saved step go into the pool from its staging page; `False` for a
                policy that keeps or defers them otherwise.
        """
        return WatchedCache(cache, self, stores_hidden=stores_hidden)

    def cache_was_reset(self) -> None:
        """Every step saved so far is gone."""
        with self._mutex:
            self._staging.forget_all()

    def check(self) -> None:
        """Raise what was found so far.

        Raises:
            HazardError: something was.
        """
        if self.hazards:
            raise HazardError(self.hazards)

    def __enter__(self) -> Self:
        self.runtime.adopt("engine")
        self._engine_watch.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._engine_watch.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        if self.hazards:
            raise HazardError(self.hazards) from error

    # -- what is told

    def torch_runs(self, access: TorchAccess) -> None:
        """A watched thread is about to run a torch operation."""
        self.num_accesses += 1
        thread = self._this_thread()
        if self._state_lock in thread.held:
            self._blame_holder(HazardKind.TORCH_UNDER_LOCK, thread, access.operation)
        if self._copies.this_thread_copies or not (access.reads or access.writes):
            return
        with self._mutex:
            self._copies.accessed(access, thread)
            for memory in access.writes:
                if self._copies.is_pinned(memory):
                    self._staging.written(memory, HazardSide(thread.where(), access.operation, memory))
            for memory in access.reads:
                self._staging.read(memory, thread, HazardSide(thread.where(), access.operation, memory))

    def may_wait(self, thread: WatchedThread, what: str) -> None:
        """A watched thread may have to wait for something."""
        if self._state_lock in thread.held:
            self._blame_holder(HazardKind.WAIT_UNDER_LOCK, thread, what)

    def save_begins(self, *, stored: bool) -> None:
        """The calling thread begins to save a step."""
        with self._mutex:
            self._staging.save_begins(stored=stored)

    def save_ended(self, step_id: int | None) -> None:
        """It has; `None`: with an exception."""
        with self._mutex:
            self._staging.save_ended(step_id)

    def consume_begins(self, step_id: int) -> None:
        """The calling thread begins to materialise or discard a step."""
        with self._mutex:
            self._staging.consume_begins(step_id, self._this_thread())

    def consume_ended(self, step_id: int) -> None:
        """It has, or the call raised."""
        with self._mutex:
            self._staging.consume_ended(step_id, self._this_thread())

    def _this_thread(self) -> WatchedThread:
        return self.runtime.this_thread

    def _may_allocate(self, what: str) -> None:
        thread = self._this_thread()
        if self._state_lock in thread.held:
            self._blame_holder(HazardKind.ALLOCATION_UNDER_LOCK, thread, what)

    def _blame_holder(self, kind: HazardKind, thread: WatchedThread, doing: str) -> None:
        holder = HazardSide(thread.where(), f"holds lock {self._state_lock!r}, of {thread.held}")
        self._found(Hazard(kind, HazardSide(thread.where(), doing), holder))

    def _found(self, hazard: Hazard) -> None:
        if len(self.hazards) < _MOST_HAZARDS:
            self.hazards.append(hazard)
