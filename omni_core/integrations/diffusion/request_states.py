# SPDX-License-Identifier: Apache-2.0
"""Where a public request stands in the scheduler, and the legal moves between its states."""

from __future__ import annotations

from enum import Enum


class RequestStatus(Enum):
    """Where a request stands, and what that means for its pages."""

    WAITING = "waiting"
    """In the queue, without pages."""
    RUNNING = "running"
    """In a wave. Holds its pages."""
    PREEMPTED = "preempted"
    """Back at the head of the queue. Still holds its pages and goes on with the same snapshot."""
    COMPLETED = "completed"
    """Its picture is done; prefix published, pages given back."""
    ABORTED = "aborted"
    """Its client left; pages given back, nothing further published."""
    FAILED = "failed"
    """Refused or broken; pages given back, nothing further published."""


LEGAL_MOVES: dict[RequestStatus, frozenset[RequestStatus]] = {
    RequestStatus.WAITING: frozenset({RequestStatus.RUNNING, RequestStatus.ABORTED, RequestStatus.FAILED}),
    RequestStatus.RUNNING: frozenset(
        {RequestStatus.PREEMPTED, RequestStatus.COMPLETED, RequestStatus.ABORTED, RequestStatus.FAILED}
    ),
    RequestStatus.PREEMPTED: frozenset({RequestStatus.RUNNING, RequestStatus.ABORTED}),
    RequestStatus.COMPLETED: frozenset(),
    RequestStatus.ABORTED: frozenset(),
    RequestStatus.FAILED: frozenset(),
}
"""What each state may be followed by. A request in a state without moves is forgotten, and its id is free again."""
