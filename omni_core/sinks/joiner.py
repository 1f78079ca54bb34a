# SPDX-License-Identifier: Apache-2.0
"""Joins the deliveries of many requests. Every sink that keeps rows uses this one implementation."""

from __future__ import annotations

from collections.abc import Callable

from omni_core.sinks.base import RequestKey, SinkDelivery, SinkRequestEnd
from omni_core.sinks.collector import RequestCollector
from omni_core.sinks.errors import RequestEndedError, SinkFullError
from omni_core.sinks.rows import CollectedRequest
from omni_core.sinks.sizes import delivery_nbytes

DEFAULT_MAX_OPEN_BYTES = 4 << 30
"""What requests that have not ended may hold if nobody says otherwise: 4 GiB."""


class RequestJoiner:
    """Collects deliveries of many requests, in bounded memory. One thread only (the feeder); blocks on nothing.

    Of a request that has not ended its rows, token ids and leftovers are counted, and what their objects cost
    (`sizes.delivery_nbytes`).

    After an error of `add` or `finish` the request's rows are gone and its later rows are refused: the feeder sends no
    more of a request whose delivery raised, so nothing else would free them. An id used again is another request.
    """

    def __init__(
        self,
        max_ended_ids: int = 65536,
        *,
        max_open_bytes: int = DEFAULT_MAX_OPEN_BYTES,
        limit_name: str = "max_open_bytes",
        make_room: Callable[[int], None] = lambda open_bytes: None,
    ) -> None:
        """Start without any request.

        Args:
            max_ended_ids: how many ended requests are remembered to refuse rows that come after the end.
            max_open_bytes: most bytes that requests which have not ended may hold together.
            limit_name: what the sink's user calls `max_open_bytes`; for errors.
            make_room: called before a delivery is copied, with the bytes that open requests will then hold.
        """
        self._max_ended_ids = max_ended_ids
        self._max_open_bytes = max_open_bytes
        self._limit_name = limit_name
        self._make_room = make_room
        self._open_bytes = 0
        self._collectors: dict[RequestKey, RequestCollector] = {}
        self._ended: dict[RequestKey, None] = {}

    @property
    def open_bytes(self) -> int:
        """Bytes that requests which have not ended hold. Any thread."""
        return self._open_bytes

    def add(self, delivery: SinkDelivery) -> None:
        """Copy one delivery's rows.

        Raises:
            RowsMismatchError: row counts, widths or dtypes disagree.
            DuplicateRowsError: a position came before.
            SinkFullError: open requests would hold more than `max_open_bytes`.
            RequestEndedError: the request has ended, or an earlier delivery of it raised.
        """
        if delivery.key in self._ended:
            raise RequestEndedError(
                f"request {delivery.req_id!r}, step {delivery.step_id}: rows {list(delivery.ranges)} came after its end"
            )
        collector = self._collectors.setdefault(delivery.key, RequestCollector(delivery.req_id))
        try:
            places = collector.places_for(delivery)
            nbytes = delivery_nbytes(delivery)
            self._admit(delivery, nbytes)
            collector.add(delivery, places, nbytes)
        except Exception:
            self._forget(delivery.key)
            raise
        self._open_bytes += nbytes

    def finish(self, end: SinkRequestEnd) -> CollectedRequest:
        """Everything that came for a request, which ends here. One without any rows gives an empty collection.

        Raises:
            RowsGapError: positions in the middle were neither delivered nor declared missing.
            RowsMismatchError: a position is missing though its hidden row was delivered.
            RequestEndedError: the request has ended before.
        """
        if end.key in self._ended:
            raise RequestEndedError(f"request {end.req_id!r} ended a second time, as {end.end.value}")
        collector = self._collectors.get(end.key) or RequestCollector(end.req_id)
        self._forget(end.key)
        return collector.collected(end)

    def clear(self) -> None:
        """Drop every request that has not ended."""
        self._collectors.clear()
        self._open_bytes = 0

    def _admit(self, delivery: SinkDelivery, nbytes: int) -> None:
        open_bytes = self._open_bytes + nbytes
        if open_bytes > self._max_open_bytes:
            raise SinkFullError(
                f"request {delivery.req_id!r}, step {delivery.step_id}: its next {nbytes} bytes would bring what "
                f"requests that have not ended hold to {open_bytes}, above {self._limit_name}={self._max_open_bytes}; "
                f"all its rows are dropped. Raise {self._limit_name}, or let fewer requests run at once"
            )
        self._make_room(open_bytes)

    def _forget(self, key: RequestKey) -> None:
        collector = self._collectors.pop(key, None)
        if collector is not None:
            self._open_bytes -= collector.nbytes
        self._ended[key] = None
        while len(self._ended) > self._max_ended_ids:
            del self._ended[next(iter(self._ended))]
