# SPDX-License-Identifier: Apache-2.0
"""Keeps ended requests in this process, to be asked for by the engine's or the client's id."""

from __future__ import annotations

from collections.abc import Mapping

from omni_core.runtime import Runtime, ThreadingRuntime
from omni_core.sinks.base import RequestEnd, SinkDelivery, SinkRequestEnd, StageSink
from omni_core.sinks.errors import AmbiguousRequestError, InvalidSinkOptionError, SinkClosedError, UnknownRequestError
from omni_core.sinks.rows import RequestJoiner, StoredRequest

_MAX_IDS_IN_MESSAGE = 20


class MemorySink(StageSink):
    """Ended requests, newest last; the oldest are dropped above `max_requests`.

    `accept`, `finish` and `close` belong to the builder thread. Every other method may be called from any thread and
    waits only for a short lock, never for a copy.
    """

    def __init__(self, *, max_requests: int = 1024, keep_aborted: bool = False, runtime: Runtime | None = None) -> None:
        """Make an empty sink.

        Args:
            max_requests: most ended requests kept; the oldest is dropped first. Their rows are the memory it costs.
            keep_aborted: whether the rows of an aborted request are kept. By default they are dropped.
            runtime: where the lock comes from; `None` is `ThreadingRuntime()`.

        Raises:
            InvalidSinkOptionError: `max_requests` is not an integer of at least 1.
        """
        if not isinstance(max_requests, int) or isinstance(max_requests, bool) or max_requests < 1:
            raise InvalidSinkOptionError(
                f"memory sink: max_requests={max_requests!r}: must be an integer of at least 1"
            )
        self._max_requests = max_requests
        self._keep_aborted = keep_aborted
        self._joiner = RequestJoiner()
        self._lock = (runtime or ThreadingRuntime()).lock("memory-sink")
        self._stored: dict[str, StoredRequest] = {}
        self._client_of: dict[str, str | None] = {}
        self._without_rows: dict[str, str] = {}
        self._running: dict[str, str | None] = {}
        self._closed = False

    def accept(self, delivery: SinkDelivery) -> None:
        if self._closed:
            raise SinkClosedError(f"memory sink: rows of request {delivery.req_id!r} came after close()")
        try:
            self._joiner.add(delivery)
        except Exception as error:
            self._note(delivery.req_id, delivery.client_req_id, f"its rows do not fit together: {error}")
            raise
        with self._lock:
            self._running.setdefault(delivery.req_id, delivery.client_req_id)

    def finish(self, end: SinkRequestEnd) -> None:
        if self._closed:
            raise SinkClosedError(f"memory sink: the end of request {end.req_id!r} came after close()")
        try:
            stored = self._kept(end)
        except Exception as error:
            self._note(end.req_id, end.client_req_id, f"its rows do not fit together: {error}")
            raise
        if stored is not None:
            self._store(stored)
        elif end.end is RequestEnd.FAILED:
            self._note(end.req_id, end.client_req_id, f"it failed: {end.error or 'no reason given'}")
        else:
            self._note(end.req_id, end.client_req_id, "it was aborted; keep_aborted=True keeps what came before")

    def close(self) -> None:
        self._closed = True
        self._joiner.clear()
        with self._lock:
            self._running.clear()

    def request(self, request_id: str) -> StoredRequest:
        """The one request behind an id, the engine's internal or the client's.

        Raises:
            AmbiguousRequestError: the id stands for several requests (`n > 1`, or an id used again); names them.
            UnknownRequestError: no rows under this id; names the ids there are, or says why this one has none.
        """
        with self._lock:
            found = self._internal_ids_of(request_id)
            if len(found) == 1 and found[0] in self._stored:
                return self._stored[found[0]]
            if len(found) > 1:
                raise AmbiguousRequestError(
                    f"request id {request_id!r} stands for {len(found)} requests: {_listed(found)}; "
                    "ask with request_by_internal_id() or requests_of_client()"
                )
            raise self._no_rows(found[0] if found else request_id)

    def request_by_internal_id(self, req_id: str) -> StoredRequest:
        """The request with this internal id, whatever clients called theirs.

        Raises:
            UnknownRequestError: no rows under this id.
        """
        with self._lock:
            if req_id in self._stored:
                return self._stored[req_id]
            raise self._no_rows(req_id)

    def requests_of_client(self, client_req_id: str) -> tuple[StoredRequest, ...]:
        """Every stored request a client started under this id, in the order they ended; empty if there is none."""
        with self._lock:
            return tuple(kept for kept in self._stored.values() if kept.client_req_id == client_req_id)

    def take(self, request_id: str) -> StoredRequest:
        """As `request`, and the sink forgets it."""
        stored = self.request(request_id)
        with self._lock:
            self._stored.pop(stored.req_id, None)
            self._client_of.pop(stored.req_id, None)
        return stored

    def request_ids(self) -> tuple[str, ...]:
        """Internal ids of the stored requests, in the order they ended."""
        with self._lock:
            return tuple(self._stored)

    def _kept(self, end: SinkRequestEnd) -> StoredRequest | None:
        collected = self._joiner.finish(end)
        if end.end is RequestEnd.FAILED or (end.end is RequestEnd.ABORTED and not self._keep_aborted):
            return None
        return collected.join()

    def _store(self, stored: StoredRequest) -> None:
        with self._lock:
            self._running.pop(stored.req_id, None)
            self._stored[stored.req_id] = stored
            self._client_of[stored.req_id] = stored.client_req_id
            dropped = None
            if len(self._stored) > self._max_requests:
                dropped = self._stored.pop(next(iter(self._stored)))
                self._remember(dropped.req_id, f"it was dropped for newer ones, max_requests={self._max_requests}")

    def _note(self, req_id: str, client_req_id: str | None, reason: str) -> None:
        with self._lock:
            self._running.pop(req_id, None)
            if req_id not in self._stored:
                self._client_of[req_id] = client_req_id
                self._remember(req_id, reason)

    def _remember(self, req_id: str, reason: str) -> None:
        self._without_rows[req_id] = reason
        while len(self._without_rows) > self._max_requests:
            forgotten = next(iter(self._without_rows))
            del self._without_rows[forgotten]
            self._client_of.pop(forgotten, None)

    def _internal_ids_of(self, request_id: str) -> tuple[str, ...]:
        known: Mapping[str, str | None] = {**self._client_of, **self._running}
        return tuple(req_id for req_id, client_req_id in known.items() if request_id in (req_id, client_req_id))

    def _no_rows(self, request_id: str) -> UnknownRequestError:
        if request_id in self._running:
            return UnknownRequestError(f"request {request_id!r} has not ended; flush the session or wait for its end")
        if request_id in self._without_rows:
            return UnknownRequestError(f"request {request_id!r} has no rows: {self._without_rows[request_id]}")
        return UnknownRequestError(f"no request {request_id!r}; ids kept: {_listed(self._names())}")

    def _names(self) -> tuple[str, ...]:
        return tuple(
            kept.req_id if kept.client_req_id is None else f"{kept.req_id} (client's {kept.client_req_id})"
            for kept in self._stored.values()
        )


def _listed(names: tuple[str, ...]) -> str:
    if not names:
        return "none"
    more = len(names) - _MAX_IDS_IN_MESSAGE
    return ", ".join(map(repr, names[:_MAX_IDS_IN_MESSAGE])) + (f" and {more} more" if more > 0 else "")
