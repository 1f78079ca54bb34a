# SPDX-License-Identifier: Apache-2.0
"""Checks of the order producer, snapshot, copy, host read; and of what happens to the source meanwhile.

On a real device a producer is made late by work queued before it, and a copy by copies queued before it.
"""

from __future__ import annotations

from omni_core.backend.base import Event
from omni_core.backend.conformance.rig import (
    LARGE_SHAPE,
    MIB,
    SMALL_SHAPE,
    WAIT_S,
    Check,
    Rig,
    require,
    require_equal,
    rows,
)

_LATE_S = 0.05
_STEPS = 3


def snapshot_sees_the_last_queued_work(rig: Rig) -> None:
    """A snapshot, and the copy of it, come after everything queued on the current stream before them."""
    stream, ring = rig.stream(), rig.ring_slot(MIB)
    destination = rig.destination(SMALL_SHAPE)
    static = rig.on_device(rows(0, SMALL_SHAPE))
    for step in range(1, _STEPS + 1):
        produced = rig.on_device(rows(step, SMALL_SHAPE))
        ring.restart()
        rig.keep_busy(_LATE_S)
        static.copy_(produced)
        rig.backend.copy_to_host(destination, rig.backend.snapshot(static, ring), stream).synchronize(WAIT_S)
        require_equal(destination, rows(step, SMALL_SHAPE), f"rows of step {step}, snapshotted right after they came")


def copy_sees_the_last_queued_work(rig: Rig) -> None:
    """A copy without a snapshot comes after everything queued on the current stream before it."""
    stream, destination = rig.stream(), rig.destination(SMALL_SHAPE)
    static = rig.on_device(rows(0, SMALL_SHAPE))
    for step in range(1, _STEPS + 1):
        produced = rig.on_device(rows(step, SMALL_SHAPE))
        rig.keep_busy(_LATE_S)
        static.copy_(produced)
        rig.backend.copy_to_host(destination, static, stream).synchronize(WAIT_S)
        require_equal(destination, rows(step, SMALL_SHAPE), f"rows of step {step}, copied right after they came")


def copies_of_a_stream_run_in_order(rig: Rig) -> None:
    """Copies of one stream are done in the order they were queued."""
    stream, destination = rig.stream(), rig.destination(LARGE_SHAPE)
    sources = [rig.on_device(rows(tag, LARGE_SHAPE)) for tag in range(1, _STEPS + 1)]
    with rig.stalled():
        events = [rig.backend.copy_to_host(destination, source, stream) for source in sources]
    events[-1].synchronize(WAIT_S)
    require(all(event.query() for event in events), "a copy is complete before one queued ahead of it")
    require_equal(destination, rows(_STEPS, LARGE_SHAPE), "copies into one place: the last must stand")


def wait_orders_two_streams(rig: Rig) -> None:
    """Work behind Stream.wait is done after the event's work, on another stream."""
    first, second = rig.stream("first"), rig.stream("second")
    large, small = rig.on_device(rows(1, LARGE_SHAPE)), rig.on_device(rows(2, SMALL_SHAPE))
    large_place, small_place = rig.destination(LARGE_SHAPE), rig.destination(SMALL_SHAPE)
    for attempt in range(_STEPS):
        with rig.stalled():
            rig.delay(first)
            large_done = rig.backend.copy_to_host(large_place, large, first)
            second.wait(large_done)
            small_done = rig.backend.copy_to_host(small_place, small, second)
        small_done.synchronize(WAIT_S)
        require(
            large_done.query(),
            f"attempt {attempt}: a copy is complete although its stream waits for an event that is not",
        )
        require_equal(large_place, rows(1, LARGE_SHAPE), "the copy that was waited for")
        require_equal(small_place, rows(2, SMALL_SHAPE), "the copy behind the wait")


def producer_can_wait_for_a_copy(rig: Rig) -> None:
    """Work of the current stream behind its wait for a copy's event comes after that copy."""
    expected = rows(1, LARGE_SHAPE)
    static, later = rig.on_device(expected), rig.on_device(rows(2, LARGE_SHAPE))
    stream, destination = rig.stream(), rig.destination(LARGE_SHAPE)
    rig.delay(stream)
    done = rig.backend.copy_to_host(destination, static, stream)
    rig.backend.current_stream().wait(done)
    static.copy_(later)
    done.synchronize(WAIT_S)
    require_equal(destination, expected, "rows whose next writer waits, on the current stream, for their copy")


def overwriting_the_source_after_snapshot_is_harmless(rig: Rig) -> None:
    """Snapshots of several steps keep their rows while each next step overwrites the one buffer they came from."""
    static = rig.on_device(rows(0, SMALL_SHAPE))
    produced = [rig.on_device(rows(step, SMALL_SHAPE)) for step in range(_STEPS + 1)]
    places = [rig.destination(SMALL_SHAPE) for _ in range(_STEPS)]
    stream, ring = rig.stream(), rig.ring(_STEPS, MIB)
    events: list[Event] = []
    with rig.stalled():
        rig.delay(stream)
        for step, place in enumerate(places):
            static.copy_(produced[step])
            clone = rig.backend.snapshot(static, ring.slot(step))
            events.append(rig.backend.copy_to_host(place, clone, stream))
        static.copy_(produced[_STEPS])
    for step, place in enumerate(places):
        events[step].synchronize(WAIT_S)
        require_equal(
            place, rows(step, SMALL_SHAPE), f"rows of step {step}, snapshotted before a graph replay overwrote them"
        )


def dropping_the_source_after_queueing_is_harmless(rig: Rig) -> None:
    """A queued copy reads the rows of its source even if it is let go and the allocator hands its memory on."""
    expected = rows(4, SMALL_SHAPE)
    source, garbage = rig.on_device(expected), rig.on_device(rows(9, SMALL_SHAPE))
    stream, destination = rig.stream(), rig.destination(SMALL_SHAPE)
    with rig.stalled():
        rig.delay(stream)
        done = rig.backend.copy_to_host(destination, source, stream)
        del source
        # Of the same size, written on the current stream: what the allocator gives the freed memory to.
        others = [garbage.clone() for _ in range(8)]
    done.synchronize(WAIT_S)
    del others
    require_equal(destination, expected, "rows whose source was let go while their copy was queued")


ORDER_CHECKS: tuple[Check, ...] = (
    snapshot_sees_the_last_queued_work,
    copy_sees_the_last_queued_work,
    copies_of_a_stream_run_in_order,
    wait_orders_two_streams,
    producer_can_wait_for_a_copy,
)
STATIC_BUFFER_CHECKS: tuple[Check, ...] = (overwriting_the_source_after_snapshot_is_harmless,)
LIFETIME_CHECKS: tuple[Check, ...] = (dropping_the_source_after_queueing_is_harmless,)
