# SPDX-License-Identifier: Apache-2.0
"""Counts what was delivered, and keeps what was not and why, in bounded memory and with bounded log output."""

from __future__ import annotations

import logging
from enum import Enum
from typing import Any

from omni_core.runtime import Runtime

_LOG = logging.getLogger(__name__)

_MAX_RECORDS = 1024
"""Most records of each kind that are kept for the report; the oldest are dropped first."""
_MAX_LOGGED_REQUESTS = 100
"""Most requests that get a line in the log; the counters go on."""


class Count(Enum):
    """One counter of the report."""

    STEPS_DELIVERED = "steps_delivered"
    """Steps handed to the sink's queue."""
    STEPS_GIVEN_UP = "steps_given_up"
    """Steps whose rows were put off, to come with a later step of the same requests."""
    STALLS = "stalls"
    """How often a run of steps given up began, for whatever reason."""
    SINK_STALLS = "sink_stalls"
    """How often the sink's queue was the reason."""
    OVERRUNS = "overruns"
    """How often the builder's own queue was full, and every open request failed."""
    DELIVERIES = "deliveries"
    """Calls of `accept` that returned."""
    ROWS_DELIVERED = "rows_delivered"
    REQUESTS_ENDED = "requests_ended"
    REQUESTS_ABORTED = "requests_aborted"
    """Of the ended ones, those that ended before their prompt was computed."""
    REQUESTS_FAILED = "requests_failed"
    REQUESTS_WITH_SINK_ERRORS = "requests_with_sink_errors"
    LAST_WORDS_DROPPED = "last_words_dropped"
    """Failed requests without a row whose end the sink was not told, because too many waited."""


class DeliveryLog:
    """Any thread; each call takes a short lock of its own."""

    def __init__(self, runtime: Runtime) -> None:
        self._lock = runtime.lock("delivery-log")
        self._counts = dict.fromkeys(Count, 0)
        self._failures: dict[str, str] = {}
        self._sink_errors: dict[str, str] = {}
        self._stage_errors: list[str] = []

    def count(self, what: Count, by: int = 1) -> None:
        """Raise a counter."""
        with self._lock:
            self._counts[what] += by

    def has_failure(self, req_id: str) -> bool:
        """Whether a failure of this id is on record."""
        with self._lock:
            return req_id in self._failures

    def request_failed(self, req_id: str, reason: str) -> None:
        """A request's rows are not delivered, for a reason of its own. Once per request."""
        logged = self._record_failure(req_id, reason)
        if logged <= _MAX_LOGGED_REQUESTS:
            _LOG.error("request %s: its rows are not delivered: %s%s", req_id, reason, _last_line(logged))

    def request_failed_with_stage(self, req_id: str, reason: str) -> None:
        """As `request_failed`, for a reason that has its line in the log already."""
        self._record_failure(req_id, reason)

    def sink_failed(self, req_id: str, what: str) -> None:
        """A call of the sink raised; the sink sees no more of that request."""
        with self._lock:
            self._counts[Count.REQUESTS_WITH_SINK_ERRORS] += 1
            logged = self._counts[Count.REQUESTS_WITH_SINK_ERRORS]
            _keep(self._sink_errors, req_id, what)
        if logged <= _MAX_LOGGED_REQUESTS:
            _LOG.error("request %s: %s; the sink sees no more of it%s", req_id, what, _last_line(logged))

    def stage_failed(self, what: str) -> None:
        """Something failed that belongs to no one request."""
        with self._lock:
            first = not self._stage_errors
            if len(self._stage_errors) < _MAX_RECORDS:
                self._stage_errors.append(what)
        if first:
            _LOG.error("%s; further errors of the stage appear in the report only", what)

    def report(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts."""
        with self._lock:
            return {
                **{what.value: number for what, number in self._counts.items()},
                "failures": dict(self._failures),
                "sink_errors": dict(self._sink_errors),
                "stage_errors": list(self._stage_errors),
            }

    def _record_failure(self, req_id: str, reason: str) -> int:
        with self._lock:
            self._counts[Count.REQUESTS_FAILED] += 1
            _keep(self._failures, req_id, reason)
            return self._counts[Count.REQUESTS_FAILED]


def error_text(error: BaseException) -> str:
    """Class and message of an error; an error that cannot even tell its message does no further harm."""
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException:
        return f"{type(error).__name__}, whose text cannot be had"


def _keep(records: dict[str, str], req_id: str, text: str) -> None:
    records[req_id] = text
    if len(records) > _MAX_RECORDS:
        del records[next(iter(records))]


def _last_line(logged: int) -> str:
    return "; further requests appear in the report only" if logged == _MAX_LOGGED_REQUESTS else ""
