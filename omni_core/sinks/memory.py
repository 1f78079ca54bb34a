# SPDX-License-Identifier: Apache-2.0
"""Keeps ended requests in this process, to be asked for by the engine's or the client's id."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from omni_core.runtime import Runtime, ThreadingRuntime
from omni_core.sinks.base import RequestEnd, RequestKey, SinkDelivery, SinkRequestEnd, StageSink
from omni_core.sinks.errors import (
    AmbiguousRequestError,
    RequestNotEndedError,
    SinkClosedError,
    SinkFullError,
    UnknownRequestError,
)
from omni_core.sinks.found_request import FoundRequest, RequestState
from omni_core.sinks.joiner import DEFAULT_MAX_OPEN_BYTES, RequestJoiner
from omni_core.sinks.options import checked_bool, checked_count
from omni_core.sinks.request_index import RequestIndex, RequestNames
from omni_core.sinks.rows import StoredRequest

_MAX_IDS_IN_MESSAGE = 20


class MemorySink(StageSink):
    """Ended requests, newest last; the oldest are dropped above `max_requests` or `max_bytes`.

    Requests that have not ended count towards `max_bytes`, too, as `RequestJoiner` counts them. Ended ones make room
    for them. Where that does not help, the request whose rows come next is dropped: `accept` raises `SinkFullError`.

    `accept`, `finish` and `close` belong to the feeder thread. Every other method may be called from any thread and
    waits only for a short lock, never for a copy.
    """

    option_rules: ClassVar = {"max_requests": checked_count, "max_bytes": checked_count, "keep_aborted": checked_bool}
    rows_may_wait: ClassVar = True

    def __init__(
        self,
        *,
        max_requests: int = 1024,
        max_bytes: int = DEFAULT_MAX_OPEN_BYTES,
        keep_aborted: bool = False,
        runtime: Runtime | None = None,
    ) -> None:
        """Make an empty sink.

        Args:
            max_requests: most ended requests kept; the oldest is dropped first.
            max_bytes: most bytes of all requests together, ended or not. While a request ends, its rows lie in memory
                once more than is counted.
            keep_aborted: whether the rows of an aborted request are kept. By default they are dropped.
            runtime: where the lock comes from; `None` is `ThreadingRuntime()`.

        Raises:
            InvalidSinkOptionError: an option is of another type, or a bound is below 1.
        """
        self._max_requests = checked_count("memory", "max_requests", max_requests)
        self._max_bytes = checked_count("memory", "max_bytes", max_bytes)
        self._keep_aborted = checked_bool("memory", "keep_aborted", keep_aborted)
        self._joiner = RequestJoiner(
            max_open_bytes=self._max_bytes, limit_name="max_bytes", make_room=self._drop_ended_for
        )
        self._lock = (runtime or ThreadingRuntime()).lock("memory-sink")
        self._index: RequestIndex[RequestKey] = RequestIndex()
        self._stored: dict[RequestKey, StoredRequest] = {}
        self._stored_nbytes: dict[RequestKey, int] = {}
        self._ended_bytes = 0
        self._without_rows: dict[RequestKey, str] = {}
        self._running: set[RequestKey] = set()
        self._closed = False

    def accept(self, delivery: SinkDelivery) -> None:
        if self._closed:
            raise SinkClosedError(f"memory sink: rows of request {delivery.req_id!r} came after close()")
        try:
            self._joiner.add(delivery)
        except SinkFullError as error:
            self._note(delivery, f"the sink was full: {error}")
            raise
        except Exception as error:
            self._note(delivery, f"its rows do not fit together: {error}")
            raise
        with self._lock:
            self._index.add(delivery.key, _names_of(delivery))
            self._running.add(delivery.key)

    def finish(self, end: SinkRequestEnd) -> None:
        if self._closed:
            raise SinkClosedError(f"memory sink: the end of request {end.req_id!r} came after close()")
        try:
            stored = self._kept(end)
        except Exception as error:
            self._note(end, f"its rows do not fit together: {error}")
            raise
        if stored is not None:
            self._store(end, stored)
        elif end.end is RequestEnd.FAILED:
            self._note(end, f"it failed: {end.error or 'no reason given'}")
        else:
            self._note(end, "it was aborted; keep_aborted=True keeps what came before")

    def close(self) -> None:
        self._closed = True
        self._joiner.clear()
        with self._lock:
            for key in self._running:
                self._index.discard(key)
            self._running.clear()

    @property
    def held_bytes(self) -> int:
        """Bytes of all requests, ended or not: what `max_bytes` bounds."""
        with self._lock:
            return self._ended_bytes + self._joiner.open_bytes

    def request(self, request_id: str) -> StoredRequest:
        """The one request behind an id: the engine's internal one, or the client's.

        A client's request with `n > 1` is several. An id that only looks like a sample's is the client's own, until
        another sample of the same request has come.

        Raises:
            AmbiguousRequestError: the id stands for several requests (`n > 1`, or an id used again); names them.
            UnknownRequestError: no rows under this id; names the ids there are, or says why this one has none.
        """
        with self._lock:
            found = self._index.find(request_id)
            if len(found) == 1 and found[0] in self._stored:
                return self._stored[found[0]]
            if len(found) > 1:
                raise AmbiguousRequestError(
                    f"request id {request_id!r} stands for {len(found)} requests: {_listed(map(_shown, found))}; "
                    "ask with request_by_internal_id() or requests_of_client()"
                )
            raise self._no_rows(request_id, found)

    def request_by_internal_id(self, req_id: str) -> StoredRequest:
        """The request with this internal id, whatever clients called theirs. Of an id used again, the newest.

        Raises:
            UnknownRequestError: no rows under this id, or the newest request with it has none.
        """
        with self._lock:
            newest = self._index.by_internal_id(req_id)[-1:]
            if newest and newest[0] in self._stored:
                return self._stored[newest[0]]
            raise self._no_rows(req_id, newest)

    def requests_of_client(self, client_req_id: str) -> tuple[StoredRequest, ...]:
        """Every stored request a client started under this id, all samples, in the order they ended; may be empty."""
        with self._lock:
            found = frozenset(self._index.by_client_id(client_req_id))
            return tuple(kept for key, kept in self._stored.items() if key in found)

    def take(self, request_id: str) -> StoredRequest:
        """As `request`, and the sink forgets it."""
        stored = self.request(request_id)
        with self._lock:
            key = (stored.req_id, stored.use)
            if key in self._stored:
                self._pop(key)
                self._index.discard(key)
        return stored

    def find(self, request_id: str) -> tuple[FoundRequest, ...]:
        """Every request that an id of either kind may stand for, with or without rows; takes nothing.

        One that only looks like a sample is among them even if no other sample came here: with data parallel the
        samples of one client's request lie in several engines.
        """
        with self._lock:
            return tuple(self._found(key) for key in self._index.find_possible(request_id))

    def kept(self, key: RequestKey) -> StoredRequest | None:
        """The rows of exactly this request, if they are here."""
        with self._lock:
            return self._stored.get(key)

    def forget(self, key: RequestKey) -> bool:
        """Forget exactly this request; whether it had rows here."""
        with self._lock:
            if key not in self._stored:
                return False
            self._pop(key)
            self._index.discard(key)
            return True

    def request_ids(self) -> tuple[str, ...]:
        """Internal ids of the stored requests, in the order they ended."""
        with self._lock:
            return tuple(kept.req_id for kept in self._stored.values())

    def _found(self, key: RequestKey) -> FoundRequest:
        names = self._index.names(key)
        if key in self._running:
            state = RequestState.RUNNING
        elif key in self._stored:
            state = RequestState.ENDED
        else:
            state = RequestState.WITHOUT_ROWS
        return FoundRequest(
            req_id=names.req_id,
            use=key[1],
            client_req_id=names.client_req_id,
            sample=names.sample,
            has_sibling=self._index.has_sibling(key),
            state=state,
            no_rows_because=self._without_rows.get(key),
        )

    def _kept(self, end: SinkRequestEnd) -> StoredRequest | None:
        collected = self._joiner.finish(end)
        if end.end is RequestEnd.FAILED or (end.end is RequestEnd.ABORTED and not self._keep_aborted):
            return None
        return collected.join()

    def _store(self, end: SinkRequestEnd, stored: StoredRequest) -> None:
        nbytes = stored.nbytes
        with self._lock:
            self._running.discard(end.key)
            self._without_rows.pop(end.key, None)
            self._index.add(end.key, _names_of(end))
            self._stored[end.key] = stored
            self._stored_nbytes[end.key] = nbytes
            self._ended_bytes += nbytes
            if len(self._stored) > self._max_requests:
                self._drop_oldest(f"max_requests={self._max_requests}")

    def _drop_ended_for(self, open_bytes: int) -> None:
        with self._lock:
            while self._stored and self._ended_bytes + open_bytes > self._max_bytes:
                self._drop_oldest(f"max_bytes={self._max_bytes}")

    def _drop_oldest(self, limit: str) -> None:
        oldest = next(iter(self._stored))
        self._pop(oldest)
        self._remember(oldest, f"it was dropped for newer ones, {limit}")

    def _pop(self, key: RequestKey) -> StoredRequest:
        self._ended_bytes -= self._stored_nbytes.pop(key)
        return self._stored.pop(key)

    def _note(self, of: SinkDelivery | SinkRequestEnd, reason: str) -> None:
        with self._lock:
            self._running.discard(of.key)
            if of.key not in self._stored:
                self._index.add(of.key, _names_of(of))
                self._remember(of.key, reason)

    def _remember(self, key: RequestKey, reason: str) -> None:
        self._without_rows[key] = reason
        while len(self._without_rows) > self._max_requests:
            forgotten = next(iter(self._without_rows))
            del self._without_rows[forgotten]
            self._index.discard(forgotten)

    def _no_rows(self, request_id: str, found: Sequence[RequestKey]) -> UnknownRequestError:
        if found and found[0] in self._running:
            return RequestNotEndedError(
                f"request {_shown(found[0])} has not ended; flush the session or wait for its end"
            )
        if found:
            return UnknownRequestError(f"request {_shown(found[0])} has no rows: {self._without_rows[found[0]]}")
        return UnknownRequestError(f"no request {request_id!r}; ids kept: {_listed(self._kept_names())}")

    def _kept_names(self) -> tuple[str, ...]:
        return tuple(
            repr(kept.req_id if kept.client_req_id is None else f"{kept.req_id} (client's {kept.client_req_id})")
            for kept in self._stored.values()
        )


def _names_of(of: SinkDelivery | SinkRequestEnd) -> RequestNames:
    return RequestNames(of.req_id, of.client_req_id, of.sample)


def _shown(key: RequestKey) -> str:
    req_id, use = key
    return repr(req_id) if use == 0 else f"{req_id!r} (use {use + 1})"


def _listed(shown: Iterable[str]) -> str:
    names = tuple(shown)
    if not names:
        return "none"
    more = len(names) - _MAX_IDS_IN_MESSAGE
    return ", ".join(names[:_MAX_IDS_IN_MESSAGE]) + (f" and {more} more" if more > 0 else "")
