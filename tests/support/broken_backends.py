# SPDX-License-Identifier: Apache-2.0
"""Backends that break one promise each: the simulator, but for one mistake that a real backend could make.

`BROKEN` says which checks of the conformance suite notice each. Their docstrings say the mistake; the documentation
shows them.
What they do beside the promise they break is done without torch's operations, which a check counts.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from omni_core_cpu_sim import CaptureSizePadding, CpuSimBackend

from omni_core.backend import (
    BackendError,
    ByteCarver,
    DeviceWaitTimeoutError,
    Event,
    GraphPadding,
    PinnedArena,
    SnapshotRing,
    Stream,
)
from omni_core.backend.observer import DeviceObserver, ObservedCopy
from omni_core.runtime import Runtime

MIB = 1 << 20


class WrappedEvent(Event):
    def __init__(self, inner: Event) -> None:
        self.inner = inner

    def query(self) -> bool:
        return self.inner.query()

    def synchronize(self, timeout_s: float) -> None:
        self.inner.synchronize(timeout_s)


class WrappedStream(Stream):
    def __init__(self, inner: Stream) -> None:
        self.inner = inner

    @property
    def name(self) -> str:
        return self.inner.name

    def record(self) -> Event:
        return self.inner.record()

    def wait(self, event: Event) -> None:
        self.inner.wait(event.inner if isinstance(event, WrappedEvent) else event)

    def close(self) -> None:
        self.inner.close()


class WrappingBackend(CpuSimBackend):
    """Its streams are wrapped, so that its events may be, too."""

    def current_stream(self) -> Stream:
        return WrappedStream(super().current_stream())

    def new_stream(self, name: str) -> Stream:
        return WrappedStream(super().new_stream(name))

    def copy_to_host(self, destination: torch.Tensor, source: torch.Tensor, stream: Stream) -> Event:
        return super().copy_to_host(destination, source, stream.inner)


def unwatched_copy(rows: torch.Tensor) -> torch.Tensor:
    """A copy made by numpy, of which torch's dispatcher hears nothing."""
    return torch.from_numpy(rows.contiguous().view(torch.uint8).numpy().copy()).view(rows.dtype).view(rows.shape)


class ByTensor:
    """Rows remembered for tensor objects, for as long as those live; tensors themselves are no keys."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}

    def __setitem__(self, tensor: torch.Tensor, rows: torch.Tensor) -> None:
        self._kept[id(tensor)] = (weakref.ref(tensor), rows)

    def get(self, tensor: torch.Tensor) -> torch.Tensor | None:
        reference, rows = self._kept.get(id(tensor), (None, None))
        return rows if reference is not None and reference() is tensor else None


class LargeCopiesAreSlow(DeviceObserver):
    """Lets copies of 2 MiB and more begin late, so that whoever does not wait for them is ahead of them for certain."""

    def __init__(self, runtime: Runtime, *, streams_named: str = "") -> None:
        self._runtime = runtime
        self._streams_named = streams_named

    def copy_begins(self, copy: ObservedCopy) -> None:
        if copy.source.nbytes >= 2 * MIB and copy.stream.endswith(self._streams_named):
            self._runtime.sleep(0.05)


class OwnsForeignTensors(CpuSimBackend):
    """It says that tensors of other devices are its own."""

    def owns(self, tensor: torch.Tensor) -> bool:
        return True


class PaddingShrinks(CpuSimBackend):
    """It pads a step to the largest graph that fits into it, which loses rows."""

    def graph_padding(self, capture_sizes: tuple[int, ...]) -> CaptureSizePadding:
        class Shrinking(CaptureSizePadding, GraphPadding):
            def padded(self, num_tokens: int) -> int:
                return max((size for size in capture_sizes if size <= num_tokens), default=num_tokens)

        return Shrinking(capture_sizes)


class ArenaStaysOnTheBooks(CpuSimBackend):
    """It counts an arena's bytes as page-locked after it was closed, and none before."""

    def pinned_arena(self, nbytes: int, *, chunk_bytes: int = 0) -> PinnedArena:
        inner = super().pinned_arena(nbytes, chunk_bytes=chunk_bytes)
        if chunk_bytes:
            return inner

        class Leaking(PinnedArena):
            closed = False

            @property
            def buffer(self) -> torch.Tensor:
                return inner.buffer

            @property
            def pinned_bytes(self) -> int:
                return nbytes if self.closed else 0

            def close(self) -> None:
                self.closed = True
                inner.close()

        return Leaking()


class ClaimsPinnedMemoryItHasNot(CpuSimBackend):
    """It says that its arenas are page-locked; they are ordinary memory."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime, report_arenas_as_pinned=True)


class PiecesAreWhole(CpuSimBackend):
    """It rounds an arena up to whole pieces."""

    def pinned_arena(self, nbytes: int, *, chunk_bytes: int = 0) -> PinnedArena:
        return super().pinned_arena(nbytes if chunk_bytes == 0 else -(-nbytes // chunk_bytes) * chunk_bytes)


class RefusalsSpoilLaterArenas(CpuSimBackend):
    """It refuses every arena after one that was refused."""

    refused = False

    def pinned_arena(self, nbytes: int, *, chunk_bytes: int = 0) -> PinnedArena:
        if self.refused:
            raise MemoryError("an earlier allocation failed")
        try:
            return super().pinned_arena(nbytes, chunk_bytes=chunk_bytes)
        except MemoryError:
            self.refused = True
            raise


class RingHidesItsMemory(CpuSimBackend):
    """It says that a ring holds nothing on the device."""

    def snapshot_ring(self, depth: int, nbytes: int, device: torch.device) -> SnapshotRing:
        inner = super().snapshot_ring(depth, nbytes, device)

        class Hiding(SnapshotRing):
            device_bytes = 0

            def slot(self, index: int) -> ByteCarver:
                return inner.slot(index)

            def close(self) -> None:
                inner.close()

        return Hiding()


class NansAreCleaned(CpuSimBackend):
    """It copies floats as numbers, not as bits: NaNs come out as others."""

    def copy_to_host(self, destination: torch.Tensor, source: torch.Tensor, stream: Stream) -> Event:
        return super().copy_to_host(
            destination, torch.nan_to_num(source) if source.is_floating_point() else source, stream
        )


class StridesAreForgotten(CpuSimBackend):
    """It clones the first bytes of strided rows, as if they lay one behind the other."""

    def refresh_snapshot(self, clone: torch.Tensor, tensor: torch.Tensor) -> None:
        if not tensor.is_contiguous():
            tensor = tensor.as_strided(clone.shape, clone.stride())
        super().refresh_snapshot(clone, tensor)


class RefusesInferenceMode(CpuSimBackend):
    """Its copies are in-place updates of tensors that inference mode does not let it write."""

    def copy_to_host(self, destination: torch.Tensor, source: torch.Tensor, stream: Stream) -> Event:
        if torch.is_inference_mode_enabled():
            raise RuntimeError("Inplace update to inference tensor outside InferenceMode is not allowed.")
        return super().copy_to_host(destination, source, stream)


class RingSlotIsNotRestarted(CpuSimBackend):
    """It hands a ring's buffer out again without starting at its first byte."""

    def snapshot_ring(self, depth: int, nbytes: int, device: torch.device) -> SnapshotRing:
        inner = super().snapshot_ring(depth, nbytes, device)
        carvers = [ByteCarver(torch.empty(nbytes + 64, dtype=torch.uint8)) for _ in range(depth)]
        used = set()

        class Worn(SnapshotRing):
            def slot(self, index: int) -> ByteCarver:
                carvers[index].restart(64 if index in used else 0)
                used.add(index)
                return carvers[index]

            @property
            def device_bytes(self) -> int:
                return inner.device_bytes

            def close(self) -> None:
                inner.close()

        return Worn()


class SnapshotIsAStepLate(CpuSimBackend):
    """A snapshot of a buffer does not wait for its producer: it holds the rows of the last one there, a step before."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self._taken_from = ByTensor()
        self._before = ByTensor()

    def refresh_snapshot(self, clone: torch.Tensor, tensor: torch.Tensor) -> None:
        now = unwatched_copy(tensor)
        late = self._before.get(clone) if self._taken_from.get(clone) is tensor else None
        super().refresh_snapshot(clone, tensor if late is None else late)
        self._before[clone] = now
        self._taken_from[clone] = tensor


class CopyIsAStepLate(CpuSimBackend):
    """Its copy of a tensor that is no snapshot does not wait for the producer: it takes the rows of the step before."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self._clones = ByTensor()
        self._before = ByTensor()

    def refresh_snapshot(self, clone: torch.Tensor, tensor: torch.Tensor) -> None:
        self._clones[clone] = clone
        super().refresh_snapshot(clone, tensor)

    def copy_to_host(self, destination: torch.Tensor, source: torch.Tensor, stream: Stream) -> Event:
        if self._clones.get(source) is not None or source.dtype != torch.int32:
            return super().copy_to_host(destination, source, stream)
        now = unwatched_copy(source)
        late = self._before.get(source)
        self._before[source] = now
        return super().copy_to_host(destination, source if late is None else late, stream)


class StreamHasTwoLanes(CpuSimBackend):
    """Every second copy of a stream goes through a slower queue; only records and waits bring the two together."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime, observer=LargeCopiesAreSlow(runtime, streams_named="second lane"))

    def new_stream(self, name: str) -> Stream:
        lanes = [super().new_stream(name), super().new_stream(f"{name}, second lane")]

        class TwoLanes(WrappedStream):
            lanes_to_come = lanes

            def take_lane(self) -> Stream:
                self.lanes_to_come = self.lanes_to_come[::-1]
                return self.lanes_to_come[-1]

            def record(self) -> Event:
                self.inner.wait(lanes[1].record())
                return self.inner.record()

            def wait(self, event: Event) -> None:
                for lane in lanes:
                    lane.wait(event)

            def close(self) -> None:
                for lane in lanes:
                    lane.close()

        return TwoLanes(lanes[0])

    def copy_to_host(self, destination: torch.Tensor, source: torch.Tensor, stream: Stream) -> Event:
        return super().copy_to_host(destination, source, stream.take_lane())


class StreamWaitIsIgnored(CpuSimBackend):
    """A stream of its own does not wait for an event."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime, observer=LargeCopiesAreSlow(runtime))

    def new_stream(self, name: str) -> Stream:
        class Deaf(WrappedStream):
            def wait(self, event: Event) -> None:
                return None

        return Deaf(super().new_stream(name))

    def copy_to_host(self, destination: torch.Tensor, source: torch.Tensor, stream: Stream) -> Event:
        return super().copy_to_host(destination, source, stream.inner)


class ProducerDoesNotWait(CpuSimBackend):
    """The producer's stream does not wait for an event."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime, observer=LargeCopiesAreSlow(runtime))

    def current_stream(self) -> Stream:
        class Deaf(WrappedStream):
            def wait(self, event: Event) -> None:
                return None

        return Deaf(super().current_stream())


class SnapshotIsAnAlias(CpuSimBackend):
    """It copies a snapshot's rows from where they were taken, which by then may hold another step's."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self._taken_from = ByTensor()

    def refresh_snapshot(self, clone: torch.Tensor, tensor: torch.Tensor) -> None:
        super().refresh_snapshot(clone, tensor)
        self._taken_from[clone] = tensor if tensor.is_contiguous() else clone

    def copy_to_host(self, destination: torch.Tensor, source: torch.Tensor, stream: Stream) -> Event:
        original = self._taken_from.get(source)
        return super().copy_to_host(destination, source if original is None else original, stream)


class SourceIsForgotten(CpuSimBackend):
    """It keeps no source alive: once let go, a source's memory holds something else before its copy is made."""

    def copy_to_host(self, destination: torch.Tensor, source: torch.Tensor, stream: Stream) -> Event:
        if not source.is_contiguous():
            return super().copy_to_host(destination, source, stream)
        memory = unwatched_copy(source)
        done = super().copy_to_host(destination, memory, stream)
        weakref.finalize(source, memory.view(torch.uint8).numpy().fill, 0xEE)
        return done


class EventsCompleteTooEarly(WrappingBackend):
    """The thread that queued a copy is told at once that it is complete."""

    def copy_to_host(self, destination: torch.Tensor, source: torch.Tensor, stream: Stream) -> Event:
        queued_by = threading.get_ident()

        class Early(WrappedEvent):
            def query(self) -> bool:
                return threading.get_ident() == queued_by or self.inner.query()

        return Early(super().copy_to_host(destination, source, stream))


class EventOfTheFirstPart(CpuSimBackend):
    """It makes large copies in two parts and hands out the event of the first."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime, observer=LargeCopiesAreSlow(runtime))

    def copy_to_host(self, destination: torch.Tensor, source: torch.Tensor, stream: Stream) -> Event:
        if source.nbytes <= 4 * MIB:
            return super().copy_to_host(destination, source, stream)
        half = len(source) // 2
        first = super().copy_to_host(destination[:half], source[:half], stream)
        super().copy_to_host(destination[half:], source[half:], stream)
        return first


class LateEvent(Event):
    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def query(self) -> bool:
        return self.stream.record().query()

    def synchronize(self, timeout_s: float) -> None:
        self.stream.record().synchronize(timeout_s)


class EventsCoverLaterWork(WrappingBackend):
    """Its recorded events are recorded when they are asked, and so cover what was queued until then."""

    def new_stream(self, name: str) -> Stream:
        class Procrastinating(WrappedStream):
            def record(self) -> Event:
                return LateEvent(self.inner)

            def wait(self, event: Event) -> None:
                self.inner.wait(event.stream.record() if isinstance(event, LateEvent) else event)

        return Procrastinating(CpuSimBackend.new_stream(self, name))


class EventsAreRecycled(WrappingBackend):
    """It has one event for all copies of a stream, also for those whose event somebody still holds."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self._events: dict[str, WrappedEvent] = {}

    def copy_to_host(self, destination: torch.Tensor, source: torch.Tensor, stream: Stream) -> Event:
        done = super().copy_to_host(destination, source, stream)
        event = self._events.setdefault(stream.name, WrappedEvent(done))
        event.inner = done
        return event


class CopiesAtOnce(CpuSimBackend):
    """Its copies are made when it returns, although it says that they run beside the caller."""

    def hold_copies(self) -> AbstractContextManager[None]:
        return nullcontext()  # nothing is ever left to hold back

    def copy_to_host(self, destination: torch.Tensor, source: torch.Tensor, stream: Stream) -> Event:
        done = super().copy_to_host(destination, source, stream)
        done.synchronize(10.0)
        return done


class SnapshotAllocates(CpuSimBackend):
    """It clones into fresh memory before it fills the ring."""

    def refresh_snapshot(self, clone: torch.Tensor, tensor: torch.Tensor) -> None:
        super().refresh_snapshot(clone, tensor.clone())


class TimeoutsAreSwallowed(WrappingBackend):
    """Its waits end in time, and do not say that they waited in vain."""

    def copy_to_host(self, destination: torch.Tensor, source: torch.Tensor, stream: Stream) -> Event:
        class Silent(WrappedEvent):
            def synchronize(self, timeout_s: float) -> None:
                try:
                    self.inner.synchronize(timeout_s)
                except DeviceWaitTimeoutError:
                    return

        return Silent(super().copy_to_host(destination, source, stream))


class TimeoutsAreNotExplained(WrappingBackend):
    """Its time-outs name neither the stream nor the time."""

    def copy_to_host(self, destination: torch.Tensor, source: torch.Tensor, stream: Stream) -> Event:
        class Terse(WrappedEvent):
            def synchronize(self, timeout_s: float) -> None:
                try:
                    self.inner.synchronize(timeout_s)
                except DeviceWaitTimeoutError:
                    raise DeviceWaitTimeoutError("timed out") from None

        return Terse(super().copy_to_host(destination, source, stream))


class ThreeThreadsAreTooMany(CpuSimBackend):
    """It has a device for two threads only."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self._threads: set[int] = set()

    def copy_to_host(self, destination: torch.Tensor, source: torch.Tensor, stream: Stream) -> Event:
        self._threads.add(threading.get_ident())
        if len(self._threads) > 2:
            raise BackendError("context is empty (107002)")
        return super().copy_to_host(destination, source, stream)


class StreamsBelongToTheirThread(CpuSimBackend):
    """A stream works on the first thread that copies with it, and on no other."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self._owners: dict[str, int] = {}

    def copy_to_host(self, destination: torch.Tensor, source: torch.Tensor, stream: Stream) -> Event:
        if self._owners.setdefault(stream.name, threading.get_ident()) != threading.get_ident():
            raise BackendError(f"stream {stream.name!r} is another thread's")
        return super().copy_to_host(destination, source, stream)


class EventsBelongToTheirThread(WrappingBackend):
    """A thread that did not queue a copy does not wait for it."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime, observer=LargeCopiesAreSlow(runtime))

    def copy_to_host(self, destination: torch.Tensor, source: torch.Tensor, stream: Stream) -> Event:
        queued_by = threading.get_ident()

        class Private(WrappedEvent):
            def synchronize(self, timeout_s: float) -> None:
                if threading.get_ident() == queued_by:
                    self.inner.synchronize(timeout_s)

        return Private(super().copy_to_host(destination, source, stream))


class RefusedMemoryIsNotExplained(CpuSimBackend):
    """It refuses an arena without a word."""

    def pinned_arena(self, nbytes: int, *, chunk_bytes: int = 0) -> PinnedArena:
        try:
            return super().pinned_arena(nbytes, chunk_bytes=chunk_bytes)
        except MemoryError:
            raise MemoryError from None


class CopiesAreBroadcast(CpuSimBackend):
    """It makes unequal copies fit."""

    def copy_to_host(self, destination: torch.Tensor, source: torch.Tensor, stream: Stream) -> Event:
        if destination.shape != source.shape or destination.dtype != source.dtype:
            source = source.to(destination.dtype).expand(destination.shape).contiguous()
        return super().copy_to_host(destination, source, stream)


class StridedCopiesAreMadeAnyway(CpuSimBackend):
    """It copies strided rows through a temporary, and holds the caller up."""

    def copy_to_host(self, destination: torch.Tensor, source: torch.Tensor, stream: Stream) -> Event:
        if destination.is_contiguous() and source.is_contiguous():
            return super().copy_to_host(destination, source, stream)
        destination.copy_(source)
        return stream.record()


class AnyDestinationWillDo(CpuSimBackend):
    """It copies into ordinary memory, and holds the caller up."""

    def copy_to_host(self, destination: torch.Tensor, source: torch.Tensor, stream: Stream) -> Event:
        try:
            return super().copy_to_host(destination, source, stream)
        except ValueError as error:
            if "arena" not in str(error):
                raise
        destination.copy_(source)
        return stream.record()


class CloseDropsQueuedWork(CpuSimBackend):
    """It closes a stream without looking at what it still holds."""

    def __init__(self, runtime: Runtime) -> None:
        closed: set[str] = set()
        self._closed_streams = closed

        class LateWork(DeviceObserver):
            def copy_begins(self, copy: ObservedCopy) -> None:
                if copy.source.nbytes < 2 * MIB:
                    return
                for _ in range(30):  # a large copy begins late enough for a close to come first
                    if copy.stream in closed:
                        raise RuntimeError("the stream is gone")
                    runtime.sleep(0.001)

        super().__init__(runtime, observer=LateWork())

    def new_stream(self, name: str) -> Stream:
        closed = self._closed_streams

        class Dropping(WrappedStream):
            def close(self) -> None:
                closed.add(self.name)
                self.inner.close()

        return Dropping(super().new_stream(name))

    def copy_to_host(self, destination: torch.Tensor, source: torch.Tensor, stream: Stream) -> Event:
        return super().copy_to_host(destination, source, stream.inner)


BROKEN: Mapping[type[CpuSimBackend], Mapping[str, str]] = {
    OwnsForeignTensors: {"describes_itself": "'meta'"},
    PaddingShrinks: {"padding_never_shrinks_a_step": "padded to"},
    ArenaStaysOnTheBooks: {"arenas_are_accounted": r"pinned_bytes=12352 after close\(\)"},
    ClaimsPinnedMemoryItHasNot: {"arenas_are_accounted": "is_pinned"},
    PiecesAreWhole: {"an_arena_in_pieces_is_one_range": "in pieces has"},
    RefusalsSpoilLaterArenas: {"a_refused_arena_leaves_nothing": "an earlier allocation failed"},
    RingHidesItsMemory: {"rings_are_accounted": "device_bytes=0"},
    NansAreCleaned: {"rows_arrive_unchanged": "elements differ"},
    StridesAreForgotten: {"strided_rows_are_snapshotted": "elements differ"},
    RefusesInferenceMode: {"inference_mode_makes_no_difference": "Inplace update"},
    RingSlotIsNotRestarted: {"ring_and_arena_mirror_each_other": "bytes"},
    SnapshotIsAStepLate: {"snapshot_sees_the_last_queued_work": "rows of step 2"},
    CopyIsAStepLate: {"copy_sees_the_last_queued_work": "rows of step 2"},
    StreamHasTwoLanes: {"copies_of_a_stream_run_in_order": "complete before one queued ahead"},
    StreamWaitIsIgnored: {"wait_orders_two_streams": "waits for an event that is not"},
    ProducerDoesNotWait: {"producer_can_wait_for_a_copy": "elements differ"},
    SnapshotIsAnAlias: {"overwriting_the_source_after_snapshot_is_harmless": "rows of step 0"},
    SourceIsForgotten: {"dropping_the_source_after_queueing_is_harmless": "elements differ"},
    EventsCompleteTooEarly: {"events_are_never_early": r"query\(\) of its own event is True"},
    EventOfTheFirstPart: {"bytes_are_there_after_synchronize": "elements differ"},
    EventsCoverLaterWork: {"events_cover_earlier_work_only": "holds it up"},
    EventsAreRecycled: {"events_stay_complete": "not complete any more"},
    CopiesAtOnce: {"queueing_never_blocks": "made when copy_to_host returned"},
    SnapshotAllocates: {"a_step_allocates_nothing": "aten.clone"},
    TimeoutsAreSwallowed: {"waits_are_bounded": "must raise DeviceWaitTimeoutError"},
    TimeoutsAreNotExplained: {"timeouts_are_explained": "must name the stream"},
    ThreeThreadsAreTooMany: {"threads_may_use_it_together": "107002"},
    StreamsBelongToTheirThread: {"threads_may_share_a_stream": "another thread's"},
    EventsBelongToTheirThread: {"events_hold_on_every_thread": r"after synchronize\(\) on another thread"},
    RefusedMemoryIsNotExplained: {"refused_memory_is_explained": "must name the size"},
    CopiesAreBroadcast: {"unequal_copies_are_refused": "was accepted"},
    StridedCopiesAreMadeAnyway: {"strided_copies_are_refused": "was accepted"},
    AnyDestinationWillDo: {"pageable_destinations_are_refused": "was accepted"},
    CloseDropsQueuedWork: {"closing_runs_what_is_queued": "the stream is gone"},
}
"""Each broken backend, with exactly the checks that fail on it and what they then say, as regular expressions."""
