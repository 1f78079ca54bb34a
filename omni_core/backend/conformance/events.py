# SPDX-License-Identifier: Apache-2.0
"""Checks of events that tell the truth, and of waits that end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from omni_core.backend.base import Event, Stream
from omni_core.backend.conformance.rig import (
    LARGE_SHAPE,
    SMALL_SHAPE,
    UNWRITTEN,
    WAIT_S,
    Check,
    Rig,
    require,
    require_equal,
    rows,
)
from omni_core.backend.errors import DeviceWaitTimeoutError

_HUGE_SHAPE = (1024, 2048)
"""8 MiB of int32: where a driver or a backend may begin to copy in parts."""
_SHORT_WAIT_S = 0.02


def events_are_never_early(rig: Rig) -> None:
    """An event's query() is True only once the bytes can be read."""
    expected = rows(6, LARGE_SHAPE)
    source, stream, destination = rig.on_device(expected), rig.stream(), rig.destination(LARGE_SHAPE)
    for attempt in range(4):
        destination.fill_(UNWRITTEN)
        with rig.stalled():
            copied = rig.backend.copy_to_host(destination, source, stream)
            recorded = stream.record()
            for what, event in (("its own event", copied), ("an event recorded behind it", recorded)):
                require(
                    not event.query() or bool((destination == expected).all()),
                    f"query() of {what} is True although the copy has not been made",
                )
        deadline_s = rig.runtime.monotonic_s() + WAIT_S
        while not copied.query():
            require(rig.runtime.monotonic_s() < deadline_s, f"query() never became True within {WAIT_S} s")
        require_equal(destination, expected, f"attempt {attempt}: bytes read as soon as query() was True")
        recorded.synchronize(WAIT_S)
        require(recorded.query(), "query() is False after synchronize() returned")


def bytes_are_there_after_synchronize(rig: Rig) -> None:
    """The bytes, to the last one, can be read once synchronize() has returned."""
    stream, destination = rig.stream(), rig.destination(_HUGE_SHAPE)
    for tag in (1, 2):
        expected = rows(tag, _HUGE_SHAPE)
        source = rig.on_device(expected)
        destination.fill_(UNWRITTEN)
        copied = rig.backend.copy_to_host(destination, source, stream)
        # The event of the copy and one recorded behind it promise the same.
        (copied if tag == 1 else stream.record()).synchronize(WAIT_S)
        require_equal(destination, expected, "bytes read right after synchronize()")


def events_cover_earlier_work_only(rig: Rig) -> None:
    """An event completes without the work that its stream was given after it."""
    source, stream, destination = rig.on_device(rows(1, SMALL_SHAPE)), rig.stream(), rig.destination(SMALL_SHAPE)
    rig.backend.copy_to_host(destination, source, stream)
    earlier = stream.record()
    earlier.synchronize(WAIT_S)
    with rig.stalled():
        later = rig.backend.copy_to_host(destination, source, stream)
        complete = _is_complete(earlier)
    require(complete, "an event is not complete: work queued after it was recorded holds it up")
    later.synchronize(WAIT_S)


def events_stay_complete(rig: Rig) -> None:
    """A complete event stays complete, whatever is queued later; an event object is not used again while it is held."""
    source, stream, destination = rig.on_device(rows(1, SMALL_SHAPE)), rig.stream(), rig.destination(SMALL_SHAPE)
    held = rig.backend.copy_to_host(destination, source, stream)
    held.synchronize(WAIT_S)
    with rig.stalled():
        later = rig.backend.copy_to_host(destination, source, stream)
        complete = _is_complete(held)
    require(complete, "the event of a copy that was done is not complete any more, once another copy is queued")
    later.synchronize(WAIT_S)


def waits_are_bounded(rig: Rig) -> None:
    """A synchronize() that comes too early raises DeviceWaitTimeoutError, and in time."""
    with _stalled_copy(rig) as stalled:
        for event in stalled.events:
            started_s = rig.runtime.monotonic_s()
            error = _raised_by_short_wait(event)
            waited_s = rig.runtime.monotonic_s() - started_s
            require(
                error is not None or bool((stalled.destination != UNWRITTEN).all()),
                f"synchronize({_SHORT_WAIT_S}) returned although the copy was stalled; it must raise "
                "DeviceWaitTimeoutError",
            )
            require(waited_s < WAIT_S, f"synchronize({_SHORT_WAIT_S}) took {waited_s:.1f} s")


def timeouts_are_explained(rig: Rig) -> None:
    """A time-out names the stream and the time that was given."""
    with _stalled_copy(rig) as stalled:
        for event in stalled.events:
            error = _raised_by_short_wait(event)
            require(
                error is None or (stalled.stream.name in str(error) and str(_SHORT_WAIT_S) in str(error)),
                f"the time-out's message must name the stream {stalled.stream.name!r} and the time {_SHORT_WAIT_S}: "
                f"{error}",
            )


def closing_runs_what_is_queued(rig: Rig) -> None:
    """Closing a stream runs its queued work; every close may be called twice."""
    expected = rows(3, LARGE_SHAPE)
    source, stream, destination = rig.on_device(expected), rig.stream(), rig.destination(LARGE_SHAPE)
    done = rig.backend.copy_to_host(destination, source, stream)
    stream.close()
    done.synchronize(WAIT_S)
    require_equal(destination, expected, "a copy queued before its stream was closed")
    stream.close()
    rig.backend.close()
    rig.backend.close()


@dataclass(frozen=True, slots=True)
class _StalledCopy:
    stream: Stream
    destination: torch.Tensor
    events: tuple[Event, ...]
    """Of the copy, and recorded behind it; none where copies cannot be pending."""


@contextmanager
def _stalled_copy(rig: Rig) -> Iterator[_StalledCopy]:
    """A copy that is not done inside the block, and is right afterwards."""
    source, stream, destination = rig.on_device(rows(7, SMALL_SHAPE)), rig.stream("slow"), rig.destination(SMALL_SHAPE)
    with rig.stalled():
        done = rig.backend.copy_to_host(destination, source, stream)
        yield _StalledCopy(stream, destination, (done, stream.record()) if rig.copies_can_be_pending else ())
    done.synchronize(WAIT_S)
    require_equal(destination, rows(7, SMALL_SHAPE), "rows of a copy that a wait had given up on")


def _raised_by_short_wait(event: Event) -> DeviceWaitTimeoutError | None:
    try:
        event.synchronize(_SHORT_WAIT_S)
    except DeviceWaitTimeoutError as caught:
        return caught
    return None


def _is_complete(event: Event) -> bool:
    return event.query() and _raised_by_short_wait(event) is None


VISIBILITY_CHECKS: tuple[Check, ...] = (events_are_never_early, bytes_are_there_after_synchronize)
EVENT_CHECKS: tuple[Check, ...] = (events_cover_earlier_work_only, events_stay_complete)
TIMEOUT_CHECKS: tuple[Check, ...] = (waits_are_bounded, timeouts_are_explained)
CLOSING_CHECKS: tuple[Check, ...] = (closing_runs_what_is_queued,)
