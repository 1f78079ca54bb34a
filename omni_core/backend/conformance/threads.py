# SPDX-License-Identifier: Apache-2.0
"""Checks of several threads at one backend: the engine's, the committer's, the prefetcher's."""

from __future__ import annotations

from collections.abc import Callable

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

_THREADS = 4
_ROUNDS = 16


def threads_may_use_it_together(rig: Rig) -> None:
    """Several bound threads may use one backend at a time, each with streams of its own."""
    last_events: list[Event] = []
    ring = rig.ring(_THREADS, MIB)
    pages = [rig.page(MIB) for _ in range(_THREADS)]

    def worker(number: int) -> Callable[[], None]:
        def work() -> None:
            stream = rig.stream(f"worker-{number}")
            for turn in range(_ROUNDS):
                expected = rows(number * _ROUNDS + turn, SMALL_SHAPE)
                pages[number].restart()
                destination = pages[number].take(expected.shape, expected.dtype)
                clone = rig.backend.snapshot(rig.on_device(expected), ring.slot(number))
                done = rig.backend.copy_to_host(destination, clone, stream)
                done.synchronize(WAIT_S)
                require_equal(destination, expected, f"thread {number}, turn {turn}")
            last_events.append(done)

        return work

    rig.run_beside(*map(worker, range(_THREADS)))
    for event in last_events:
        require(event.query(), "an event another thread waited for is not complete on this one")


def threads_may_share_a_stream(rig: Rig) -> None:
    """A thread may use a stream that another one made and used before it."""
    stream = rig.stream()
    sources = [rig.on_device(rows(number, SMALL_SHAPE)) for number in range(3)]
    places = [rig.destination(SMALL_SHAPE) for _ in sources]
    rig.backend.copy_to_host(places[0], sources[0], stream)
    rig.run_beside(lambda: rig.backend.copy_to_host(places[1], sources[1], stream).synchronize(WAIT_S))
    rig.backend.copy_to_host(places[2], sources[2], stream).synchronize(WAIT_S)
    for number, place in enumerate(places):
        require_equal(place, rows(number, SMALL_SHAPE), f"copy {number} of a stream that two threads use")


def events_hold_on_every_thread(rig: Rig) -> None:
    """A thread that did not queue a copy may wait for its event, or ask for it, and then read the bytes."""
    expected = rows(3, LARGE_SHAPE)
    source, stream, destination = rig.on_device(expected), rig.stream(), rig.destination(LARGE_SHAPE)
    done = rig.backend.copy_to_host(destination, source, stream)

    def wait() -> None:
        done.synchronize(WAIT_S)
        require_equal(destination, expected, "bytes read after synchronize() on another thread")

    def ask() -> None:
        deadline_s = rig.runtime.monotonic_s() + WAIT_S
        while not done.query():
            require(rig.runtime.monotonic_s() < deadline_s, f"query() never became True within {WAIT_S} s")
            rig.runtime.sleep(0.0005)
        require_equal(destination, expected, "bytes read after query() on another thread")

    rig.run_beside(wait, ask)
    done.synchronize(WAIT_S)


THREAD_CHECKS: tuple[Check, ...] = (
    threads_may_use_it_together,
    threads_may_share_a_stream,
    events_hold_on_every_thread,
)
