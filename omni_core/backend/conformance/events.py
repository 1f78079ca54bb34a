# SPDX-License-Identifier: Apache-2.0
"""Checks of when things happen: order, events that tell the truth, waits that end."""

from __future__ import annotations

from collections.abc import Callable

import torch

from omni_core.backend.base import Event
from omni_core.backend.conformance.rig import SMALL_SHAPE, WAIT_S, Check, Rig, require, require_equal, rows
from omni_core.backend.errors import DeviceWaitTimeoutError
from omni_core.backend.memory import tensor_nbytes

_MIB = 1 << 20
_LARGE_SHAPE = (512, 1024)
_LARGE_NBYTES = tensor_nbytes(_LARGE_SHAPE, torch.int32)
_SHORT_WAIT_S = 0.02
_THREADS = 4
_ROUNDS = 16


def queueing_never_blocks(rig: Rig) -> None:
    """Snapshot, copy_to_host, record and wait return while copies are stalled."""
    source = rig.on_device(rows(5, SMALL_SHAPE))
    destination = rig.page(_MIB).take(SMALL_SHAPE, source.dtype)
    stream, other, ring = rig.stream("first"), rig.stream("second"), rig.ring_slot(_MIB)
    events: list[Event] = []

    def queue() -> None:
        rig.backend.bind_thread()
        clone = rig.backend.snapshot(source, ring)
        events.append(rig.backend.copy_to_host(destination, clone, stream))
        other.wait(stream.record())
        events.append(other.record())
        events.append(rig.backend.current_stream().record())

    with rig.stalled():
        returned = rig.runtime.spawn("conformance-queue", queue).join(WAIT_S / 3)
        done_early = rig.copies_can_be_pending and bool(events) and events[0].query()
    require(returned, "snapshot, copy_to_host, record or wait blocked the caller while copies were stalled")
    require(not done_early, "the copy was complete when copy_to_host returned, although copies were stalled")
    require(len(events) == 3, "queueing raised on another thread")
    for event in events:
        event.synchronize(WAIT_S)


def events_are_never_early(rig: Rig) -> None:
    """An event's query() is True only once the bytes can be read."""
    expected = rows(6, _LARGE_SHAPE)
    source = rig.on_device(expected)
    stream, page = rig.stream(), rig.page(_LARGE_NBYTES)
    destination = page.take(_LARGE_SHAPE, expected.dtype)
    for attempt in range(4):
        destination.fill_(-1)
        with rig.stalled():
            copied = rig.backend.copy_to_host(destination, source, stream)
            recorded = stream.record()
            if rig.copies_can_be_pending:
                require(not copied.query(), "query() of a stalled copy's event is True")
                require(not recorded.query(), "query() of an event recorded after a stalled copy is True")
        deadline_s = rig.runtime.monotonic_s() + WAIT_S
        while not copied.query():
            require(rig.runtime.monotonic_s() < deadline_s, f"query() never became True within {WAIT_S} s")
        require_equal(destination, expected, f"attempt {attempt}: bytes read as soon as query() was True")
        recorded.synchronize(WAIT_S)
        require(recorded.query(), "query() is False after synchronize() returned")


def bytes_are_there_after_synchronize(rig: Rig) -> None:
    """The bytes can be read once synchronize() has returned."""
    stream, page = rig.stream(), rig.page(_LARGE_NBYTES)
    destination = page.take(_LARGE_SHAPE, torch.int32)
    for tag in range(1, 4):
        expected = rows(tag, _LARGE_SHAPE)
        source = rig.on_device(expected)
        destination.fill_(-1)
        copied = rig.backend.copy_to_host(destination, source, stream)
        # The event of the copy and one recorded behind it promise the same.
        (copied if tag % 2 else stream.record()).synchronize(WAIT_S)
        require_equal(destination, expected, "bytes read right after synchronize()")


def copies_of_a_stream_run_in_order(rig: Rig) -> None:
    """Copies of one stream are done in the order they were queued."""
    stream, page = rig.stream(), rig.page(_LARGE_NBYTES)
    destination = page.take(_LARGE_SHAPE, torch.int32)
    sources = [rig.on_device(rows(tag, _LARGE_SHAPE)) for tag in range(1, 4)]
    with rig.stalled():
        events = [rig.backend.copy_to_host(destination, source, stream) for source in sources]
    events[-1].synchronize(WAIT_S)
    require(all(event.query() for event in events), "a copy is complete before one queued ahead of it")
    require_equal(destination, rows(3, _LARGE_SHAPE), "three copies into one place: the last must stand")


def wait_orders_two_streams(rig: Rig) -> None:
    """Work behind Stream.wait is done after the event's work, on another stream."""
    first, second = rig.stream("first"), rig.stream("second")
    large = rig.on_device(rows(1, _LARGE_SHAPE))
    small = rig.on_device(rows(2, SMALL_SHAPE))
    large_page = rig.page(_LARGE_NBYTES).take(_LARGE_SHAPE, torch.int32)
    small_page = rig.page(_MIB).take(SMALL_SHAPE, torch.int32)
    for attempt in range(4):
        large_page.fill_(-1)
        small_page.fill_(-1)
        with rig.stalled():
            large_done = rig.backend.copy_to_host(large_page, large, first)
            second.wait(large_done)
            small_done = rig.backend.copy_to_host(small_page, small, second)
        small_done.synchronize(WAIT_S)
        require(
            large_done.query(),
            f"attempt {attempt}: a copy is complete although its stream waits for an event that is not",
        )
        require_equal(large_page, rows(1, _LARGE_SHAPE), "the copy that was waited for")
        require_equal(small_page, rows(2, SMALL_SHAPE), "the copy behind the wait")


def waits_are_bounded_and_explained(rig: Rig) -> None:
    """A synchronize() that comes too early raises DeviceWaitTimeoutError in time, naming the stream and the time."""
    if not rig.copies_can_be_pending:
        return
    source = rig.on_device(rows(7, SMALL_SHAPE))
    destination = rig.page(_MIB).take(SMALL_SHAPE, source.dtype)
    stream = rig.stream("slow")
    with rig.stalled():
        done = rig.backend.copy_to_host(destination, source, stream)
        for event in (done, stream.record()):
            started_s = rig.runtime.monotonic_s()
            error: Exception | None = None
            try:
                event.synchronize(_SHORT_WAIT_S)
            except DeviceWaitTimeoutError as caught:
                error = caught
            waited_s = rig.runtime.monotonic_s() - started_s
            require(
                error is not None,
                f"synchronize({_SHORT_WAIT_S}) returned although the copy was stalled; "
                "it must raise DeviceWaitTimeoutError",
            )
            require(waited_s < WAIT_S, f"synchronize({_SHORT_WAIT_S}) took {waited_s:.1f} s")
            require(
                stream.name in str(error) and str(_SHORT_WAIT_S) in str(error),
                f"the time-out's message must name the stream {stream.name!r} and the time {_SHORT_WAIT_S}: {error}",
            )
    done.synchronize(WAIT_S)
    require_equal(destination, rows(7, SMALL_SHAPE), "rows of a copy that a wait had given up on")


def threads_may_use_it_together(rig: Rig) -> None:
    """Several bound threads may use one backend at a time."""
    last_events: list[Event] = []
    failures: list[BaseException] = []
    ring = rig.ring(_THREADS, _MIB)
    pages = [rig.page(_MIB) for _ in range(_THREADS)]

    def work(worker: int) -> None:
        try:
            rig.backend.bind_thread()
            stream = rig.stream(f"worker-{worker}")
            for turn in range(_ROUNDS):
                expected = rows(worker * _ROUNDS + turn, SMALL_SHAPE)
                pages[worker].restart()
                destination = pages[worker].take(expected.shape, expected.dtype)
                clone = rig.backend.snapshot(rig.on_device(expected), ring.slot(worker))
                done = rig.backend.copy_to_host(destination, clone, stream)
                done.synchronize(WAIT_S)
                require_equal(destination, expected, f"thread {worker}, turn {turn}")
            last_events.append(done)
        except BaseException as error:  # carried to the check's thread, whatever it is
            failures.append(error)

    def worker_target(worker: int) -> Callable[[], None]:
        return lambda: work(worker)

    threads = [rig.runtime.spawn(f"conformance-{worker}", worker_target(worker)) for worker in range(_THREADS)]
    stuck = [thread.name for thread in threads if not thread.join(WAIT_S)]
    require(not stuck, f"threads {stuck} did not end within {WAIT_S} s")
    if failures:
        raise failures[0]
    for event in last_events:
        require(event.query(), "an event another thread waited for is not complete on this one")


def closing_runs_what_is_queued(rig: Rig) -> None:
    """Closing a stream runs its queued work; every close may be called twice."""
    expected = rows(3, _LARGE_SHAPE)
    destination = rig.page(_LARGE_NBYTES).take(_LARGE_SHAPE, expected.dtype)
    destination.fill_(-1)
    stream = rig.stream()
    source = rig.on_device(expected)
    done = rig.backend.copy_to_host(destination, source, stream)
    stream.close()
    done.synchronize(WAIT_S)
    require_equal(destination, expected, "a copy queued before its stream was closed")
    stream.close()
    rig.backend.close()
    rig.backend.close()


EVENT_CHECKS: tuple[Check, ...] = (
    queueing_never_blocks,
    events_are_never_early,
    bytes_are_there_after_synchronize,
    copies_of_a_stream_run_in_order,
    wait_orders_two_streams,
    waits_are_bounded_and_explained,
    threads_may_use_it_together,
    closing_runs_what_is_queued,
)
