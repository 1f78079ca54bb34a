# SPDX-License-Identifier: Apache-2.0
"""Events as positions in a stream's queue."""

from __future__ import annotations

from typing import Protocol

from omni_core.backend.base import Event
from omni_core.backend.errors import DeviceCopyError


class CompletedEvent(Event):
    """The event of a stream whose work is done when it is queued."""

    def query(self) -> bool:
        return True

    def synchronize(self, timeout_s: float) -> None:
        return None


class EventLine(Protocol):
    """What an event needs of its stream."""

    def has_passed(self, ticket: int) -> bool: ...

    def wait_for_host(self, ticket: int, timeout_s: float) -> None: ...

    def wait_for_worker(self, ticket: int) -> None: ...

    def tell_queried(self, event: Event) -> None: ...

    def tell_waited(self, event: Event) -> None: ...


class StreamEvent(Event):
    """A position in one stream's queue; complete when the worker has passed it."""

    __slots__ = ("_failure", "_failure_cause", "_stream", "_ticket")

    def __init__(self, stream: EventLine, ticket: int) -> None:
        self._stream = stream
        self._ticket = ticket
        self._failure: str | None = None
        self._failure_cause: Exception | None = None

    def move_to(self, ticket: int) -> None:
        """Set the number of work items the event comes after. Before anyone else has the event."""
        self._ticket = ticket

    def fail(self, message: str, cause: Exception) -> None:
        """Keep the first failure of the work before the event. Worker only, before the event completes."""
        if self._failure is None:
            self._failure = message
            self._failure_cause = cause

    def query(self) -> bool:
        self._stream.tell_queried(self)
        if not self._stream.has_passed(self._ticket):
            return False
        self._raise_failure()
        return True

    def synchronize(self, timeout_s: float) -> None:
        self._stream.tell_waited(self)
        self._stream.wait_for_host(self._ticket, timeout_s)
        self._raise_failure()

    def wait_on_worker(self) -> None:
        """Block a stream's worker until the event is complete. A failure orders like success."""
        self._stream.wait_for_worker(self._ticket)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise DeviceCopyError(self._failure) from self._failure_cause
