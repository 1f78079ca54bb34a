# SPDX-License-Identifier: Apache-2.0
"""Which copies are under way, between which bytes, and who touches those bytes too early."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakSet

from omni_core.backend.base import Event
from omni_core.backend.observer import ByteRange, DeviceObserver, ObservedCopy
from omni_core.testing.hazards import Hazard, HazardKind, HazardSide
from omni_core.testing.memory_accesses import TorchAccess
from omni_core.testing.os_threads import Mutex, ThreadLocal
from omni_core.testing.staging_watch import StagingWatch
from omni_core.testing.watched_runtime import WatchedThread


@dataclass(slots=True, eq=False)
class _Pending:
    """A copy that is queued or running."""

    copy: ObservedCopy
    order: int
    """Among the copies of all streams."""
    queued_by: str
    moved_bytes: int = 0
    running: bool = False

    def side(self, memory: ByteRange) -> HazardSide:
        state = f"{self.moved_bytes} bytes moved" if self.running else "not begun"
        return HazardSide(self.queued_by, f"queued {self.copy}, {state}", memory)


class _ThisThread(ThreadLocal):
    copying: _Pending | None = None


class CopyWatch(DeviceObserver):
    """Hears of every copy from the backend, and of every torch operation from its owner.

    Args:
        found: told of each hazard.
        this_thread: who is calling.
        staging: told of copies into pinned memory.
        mutex: held while these books and those of `staging` are read or changed.
        may_allocate: told before the backend allocates.
    """

    def __init__(
        self,
        found: Callable[[Hazard], None],
        this_thread: Callable[[], WatchedThread],
        staging: StagingWatch,
        mutex: Mutex,
        may_allocate: Callable[[str], None],
    ) -> None:
        self._found = found
        self._this_thread = this_thread
        self._staging = staging
        self._mutex = mutex
        self._may_allocate = may_allocate
        self._pending: list[_Pending] = []
        self._num_queued = 0
        self._arenas: list[ByteRange] = []
        self._recorded: WeakSet[Event] = WeakSet()
        self._mine = _ThisThread()

    @property
    def this_thread_copies(self) -> bool:
        """Whether the calling thread is a device just now: its accesses are those of a queued copy."""
        return self._mine.copying is not None

    def is_pinned(self, memory: ByteRange) -> bool:
        """Whether the bytes lie in a pinned arena."""
        return any(arena.overlaps(memory) for arena in self._arenas)

    def accessed(self, access: TorchAccess, thread: WatchedThread) -> None:
        """A torch operation of a caller's thread is about to run. Mutex held."""
        for pending in self._pending:
            source, destination = pending.copy.source, pending.copy.destination
            for memory in access.reads:
                if memory.overlaps(destination):
                    self._collide(HazardKind.READ_BEFORE_COPY, thread, access, memory, pending.side(destination))
            for memory in access.writes:
                if memory.overlaps(destination):
                    self._collide(HazardKind.WRITE_BEFORE_COPY, thread, access, memory, pending.side(destination))
                if memory.overlaps(source):
                    self._collide(HazardKind.SOURCE_OVERWRITTEN, thread, access, memory, pending.side(source))

    # -- the backend tells

    def arena_wanted(self, nbytes: int) -> None:
        self._may_allocate(f"allocates a pinned arena of {nbytes} bytes")

    def ring_wanted(self, nbytes: int) -> None:
        self._may_allocate(f"allocates snapshot buffers of {nbytes} bytes")

    def arena_made(self, memory: ByteRange) -> None:
        with self._mutex:
            self._arenas.append(memory)

    def arena_closed(self, memory: ByteRange) -> None:
        with self._mutex:
            self._arenas.remove(memory)

    def copy_queued(self, copy: ObservedCopy) -> None:
        thread = self._this_thread()
        with self._mutex:
            pending = _Pending(copy, self._num_queued, thread.where())
            self._num_queued += 1
            self._pending.append(pending)
            if self.is_pinned(copy.destination):
                self._staging.written(copy.destination, pending.side(copy.destination))

    def copy_begins(self, copy: ObservedCopy) -> None:
        with self._mutex:
            mine = next(pending for pending in self._pending if pending.copy is copy)
            mine.running = True
            self._mine.copying = mine
            for earlier in self._pending:
                # Work of one stream runs in order; another stream's earlier work should have been waited for.
                if earlier.order >= mine.order or earlier.copy.stream == copy.stream:
                    continue
                for kind, ours, theirs in (
                    (HazardKind.READ_BEFORE_COPY, copy.source, earlier.copy.destination),
                    (HazardKind.WRITE_BEFORE_COPY, copy.destination, earlier.copy.destination),
                    (HazardKind.SOURCE_OVERWRITTEN, copy.destination, earlier.copy.source),
                ):
                    if ours.overlaps(theirs):
                        self._found(Hazard(kind, mine.side(ours), earlier.side(theirs)))

    def part_moved(self, copy: ObservedCopy, moved_bytes: int) -> None:
        mine = self._mine.copying
        if mine is not None:
            mine.moved_bytes = moved_bytes

    def copy_ended(self, copy: ObservedCopy, failure: Exception | None) -> None:
        self._mine.copying = None
        with self._mutex:
            self._pending = [pending for pending in self._pending if pending.copy is not copy]

    def event_recorded(self, event: Event) -> None:
        with self._mutex:
            self._recorded.add(event)

    def event_queried(self, event: Event) -> None:
        self._require_recorded(event, "asks after it")

    def event_waited(self, event: Event, waiter: str) -> None:
        self._require_recorded(event, f"lets stream {waiter!r} wait for it" if waiter else "waits for it")

    def _require_recorded(self, event: Event, doing: str) -> None:
        thread = self._this_thread()
        with self._mutex:
            if event not in self._recorded:
                other = HazardSide("device", f"{type(event).__name__}, never recorded: it is complete before any work")
                self._found(Hazard(HazardKind.EVENT_NOT_RECORDED, HazardSide(thread.where(), doing), other))

    def _collide(
        self, kind: HazardKind, thread: WatchedThread, access: TorchAccess, memory: ByteRange, other: HazardSide
    ) -> None:
        self._found(Hazard(kind, HazardSide(thread.where(), access.operation, memory), other))
