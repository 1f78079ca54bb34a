# SPDX-License-Identifier: Apache-2.0
"""Puts a request's deliveries together by position. Every sink that keeps rows uses this one implementation."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from omni_core.prefix_cache.config import HIDDEN_KEY
from omni_core.prefix_cache.outputs import TokenRange
from omni_core.sinks.base import PossibleSample, RequestEnd, RequestKey, SinkDelivery, SinkRequestEnd, is_complete
from omni_core.sinks.errors import (
    DuplicateRowsError,
    RequestEndedError,
    RowsGapError,
    RowsMismatchError,
    SinkFullError,
    UnknownRequestError,
)
from omni_core.sinks.sizes import delivery_nbytes, leftover_nbytes, rows_nbytes

DEFAULT_MAX_OPEN_BYTES = 4 << 30
"""What requests that have not ended may hold if nobody says otherwise: 4 GiB."""


@dataclass(frozen=True, slots=True)
class StoredRequest:
    """A whole request as a sink kept it: one tensor per key, rows in the order of their positions."""

    req_id: str
    """The engine's internal id."""
    client_req_id: str | None
    end: RequestEnd
    ranges: tuple[TokenRange, ...]
    """Positions kept, ascending, disjoint and not adjacent: one range for a whole request."""
    missing: tuple[TokenRange, ...]
    """Positions whose hidden rows were not delivered: computed ones, and those of the prompt not computed before the
    end. Of other keys a row may be there."""
    rows: Mapping[str, torch.Tensor]
    """Key → CPU tensor `(num_rows, *trailing)`; row `i` belongs to the `i`-th position of `ranges_of(key)`."""
    token_ids: npt.NDArray[np.int64]
    """`(num_rows,)`: the token at each position of `ranges`."""
    key_ranges: Mapping[str, tuple[TokenRange, ...]] = field(default_factory=dict)
    """Keys that came with some deliveries only, with the positions they cover."""
    leftovers: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Outputs without a row per token: the values in the order they came. Those of a step that was put off are not
    among them, which `missing` and `complete` do not tell."""
    sample: PossibleSample | None = None
    """What the id says if this is one of several samples of one client's request."""
    use: int = 0
    """How many requests of the same engine run had the same internal id before."""

    @property
    def complete(self) -> bool:
        """Whether the request was not aborted and nothing promised to it is missing."""
        return is_complete(self.end, self.missing)

    @property
    def num_rows(self) -> int:
        """How many positions are kept."""
        return sum(stop - start for start, stop in self.ranges)

    @property
    def nbytes(self) -> int:
        """Bytes of the rows, the token ids and the leftovers, the objects of these included."""
        return rows_nbytes(self.rows) + self.token_ids.nbytes + leftover_nbytes(self.leftovers)

    @property
    def positions(self) -> npt.NDArray[np.int64]:
        """`(num_rows,)`: the absolute position of each row."""
        return positions_of(self.ranges)

    @property
    def hidden_states(self) -> torch.Tensor:
        """`rows[HIDDEN_KEY]`, `(n, hidden_size)`: row `i` belongs to the `i`-th position of `ranges_of(HIDDEN_KEY)`.

        Those are the positions of `ranges`, so `n` is `num_rows`, unless other keys came for more positions: a policy
        without full hidden states delivers none behind a prefix hit.

        Raises:
            UnknownRequestError: the stage delivered no hidden rows for this request.
        """
        try:
            return self.rows[HIDDEN_KEY]
        except KeyError:
            keys = ", ".join(sorted(map(repr, self.rows))) or "none"
            raise UnknownRequestError(f"request {self.req_id!r} has no hidden rows; keys kept: {keys}") from None

    def ranges_of(self, key: str) -> tuple[TokenRange, ...]:
        """The positions that `rows[key]` covers."""
        return self.key_ranges.get(key, self.ranges)


def positions_of(ranges: Iterable[TokenRange]) -> npt.NDArray[np.int64]:
    """Every position of `ranges`, in order, as one array."""
    runs = [np.arange(start, stop, dtype=np.int64) for start, stop in ranges]
    return np.concatenate(runs) if runs else np.empty(0, dtype=np.int64)


def merge_ranges(ranges: Iterable[TokenRange]) -> tuple[TokenRange, ...]:
    """Ascending, disjoint ranges with adjacent ones made one."""
    merged: list[TokenRange] = []
    for start, stop in ranges:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)


@dataclass(frozen=True, slots=True)
class _Chunk:
    span: TokenRange
    rows: Mapping[str, torch.Tensor]
    token_ids: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CollectedRequest:
    """An ended request, not yet joined: per key its pieces in the order of their positions."""

    end: SinkRequestEnd
    ranges: tuple[TokenRange, ...]
    pieces: Mapping[str, Sequence[torch.Tensor]]
    """Key → contiguous CPU tensors that follow each other; at least one per key."""
    token_id_pieces: Sequence[npt.NDArray[np.int64]]
    key_ranges: Mapping[str, tuple[TokenRange, ...]]
    leftovers: Mapping[str, tuple[Any, ...]]

    @property
    def num_rows(self) -> int:
        """How many positions were delivered."""
        return sum(stop - start for start, stop in self.ranges)

    def join(self) -> StoredRequest:
        """One tensor per key. Copies every row once."""
        return StoredRequest(
            req_id=self.end.req_id,
            client_req_id=self.end.client_req_id,
            end=self.end.end,
            ranges=self.ranges,
            missing=self.end.missing,
            rows={key: torch.cat(tuple(pieces)) for key, pieces in self.pieces.items()},
            token_ids=np.concatenate(self.token_id_pieces) if self.token_id_pieces else np.empty(0, dtype=np.int64),
            key_ranges=self.key_ranges,
            leftovers=self.leftovers,
            sample=self.end.sample,
            use=self.end.use,
        )


class _Collector:
    """What came for one request so far, sorted by position."""

    def __init__(self, req_id: str) -> None:
        self._req_id = req_id
        self._starts: list[int] = []
        self._chunks: list[_Chunk] = []
        self._specs: dict[str, tuple[torch.Size, torch.dtype]] = {}
        self._leftovers: dict[str, list[Any]] = {}
        self.nbytes = 0

    def places_for(self, delivery: SinkDelivery) -> Sequence[int]:
        """Where each range of a delivery belongs, if it fits with what came before."""
        self._check_counts(delivery)
        self._check_specs(delivery)
        return [self._place_of(span, delivery.step_id) for span in delivery.ranges]

    def add(self, delivery: SinkDelivery, places: Sequence[int], nbytes: int) -> None:
        kept = {key: copy_of(rows) for key, rows in delivery.rows.items()}
        token_ids = np.array(delivery.token_ids, dtype=np.int64)
        at = 0
        for inserted, (place, span) in enumerate(zip(places, delivery.ranges, strict=True)):
            count = span[1] - span[0]
            cut = {key: tensor[at : at + count] for key, tensor in kept.items()}
            self._starts.insert(place + inserted, span[0])
            self._chunks.insert(place + inserted, _Chunk(span, cut, token_ids[at : at + count]))
            at += count
        for key, rows in kept.items():
            self._specs.setdefault(key, (rows.shape[1:], rows.dtype))
        for key, value in delivery.leftovers.items():
            self._leftovers.setdefault(key, []).append(deep_copy_of(value))
        self.nbytes += nbytes

    def _check_counts(self, delivery: SinkDelivery) -> None:
        where = f"request {self._req_id!r}, step {delivery.step_id}"
        for start, stop in delivery.ranges:
            if not 0 <= start < stop:
                raise RowsMismatchError(f"{where}: range [{start}, {stop}) holds no position")
        for (_, stop), (start, _) in pairwise(delivery.ranges):
            if start < stop:
                raise RowsMismatchError(f"{where}: ranges {list(delivery.ranges)} are not ascending and disjoint")
        count = sum(stop - start for start, stop in delivery.ranges)
        for key, rows in delivery.rows.items():
            if rows.dim() < 1 or rows.shape[0] != count:
                raise RowsMismatchError(
                    f"{where}: key {key!r} has shape {tuple(rows.shape)} for {count} delivered positions"
                )
        if delivery.token_ids.shape != (count,):
            raise RowsMismatchError(
                f"{where}: token_ids has shape {delivery.token_ids.shape} for {count} delivered positions"
            )

    def _check_specs(self, delivery: SinkDelivery) -> None:
        for key, rows in delivery.rows.items():
            trailing, dtype = self._specs.get(key, (rows.shape[1:], rows.dtype))
            if (rows.shape[1:], rows.dtype) != (trailing, dtype):
                raise RowsMismatchError(
                    f"request {self._req_id!r}, step {delivery.step_id}: key {key!r} came as {tuple(rows.shape[1:])} "
                    f"{rows.dtype} per row, before as {tuple(trailing)} {dtype}"
                )

    def _place_of(self, span: TokenRange, step_id: int) -> int:
        place = bisect_right(self._starts, span[0])
        neighbours = self._chunks[max(place - 1, 0) : place + 1]
        for there in neighbours:
            first, last = max(span[0], there.span[0]), min(span[1], there.span[1])
            if first < last:
                raise DuplicateRowsError(
                    f"request {self._req_id!r}, step {step_id}: positions [{first}, {last}) were delivered before"
                )
        return place

    def collected(self, end: SinkRequestEnd) -> CollectedRequest:
        ranges = merge_ranges(chunk.span for chunk in self._chunks)
        if end.end in (RequestEnd.FINISHED, RequestEnd.FLUSHED):
            self._check_whole(ranges, end.missing)
            self._check_not_delivered(end.missing)
        pieces: dict[str, list[torch.Tensor]] = {}
        spans: dict[str, list[TokenRange]] = {}
        for chunk in self._chunks:
            for key, rows in chunk.rows.items():
                pieces.setdefault(key, []).append(rows)
                spans.setdefault(key, []).append(chunk.span)
        key_ranges = {key: merge_ranges(covered) for key, covered in spans.items()}
        return CollectedRequest(
            end=end,
            ranges=ranges,
            pieces=pieces,
            token_id_pieces=[chunk.token_ids for chunk in self._chunks],
            key_ranges={key: covered for key, covered in key_ranges.items() if covered != ranges},
            leftovers={key: tuple(values) for key, values in self._leftovers.items()},
        )

    def _check_whole(self, ranges: Sequence[TokenRange], missing: Sequence[TokenRange]) -> None:
        known = sorted((*ranges, *missing))
        accounted_upto = known[0][0] if known else 0
        for start, stop in known:
            if start > accounted_upto:
                raise RowsGapError(
                    f"request {self._req_id!r}: positions [{accounted_upto}, {start}) were neither delivered nor "
                    f"reported missing (delivered {list(ranges)}, missing {list(missing)})"
                )
            accounted_upto = max(accounted_upto, stop)

    def _check_not_delivered(self, missing: Sequence[TokenRange]) -> None:
        """`missing` speaks of hidden rows: where they are missing, rows of other keys may have come."""
        hidden = merge_ranges(chunk.span for chunk in self._chunks if HIDDEN_KEY in chunk.rows)
        for (_, stop), (start, _) in pairwise(sorted((*hidden, *missing))):
            if start < stop:
                raise RowsMismatchError(
                    f"request {self._req_id!r}: positions [{start}, {stop}) are reported missing but were delivered, "
                    f"or reported twice (delivered {list(hidden)}, missing {list(missing)})"
                )


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
        self._collectors: dict[RequestKey, _Collector] = {}
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
        collector = self._collectors.setdefault(delivery.key, _Collector(delivery.req_id))
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
        collector = self._collectors.get(end.key) or _Collector(end.req_id)
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


def copy_of(rows: torch.Tensor) -> torch.Tensor:
    """A contiguous copy that shares no memory with `rows`."""
    return rows.detach().clone(memory_format=torch.contiguous_format)


def deep_copy_of(value: Any) -> Any:
    """A leftover with every tensor and array in it copied; other objects pass through."""
    if isinstance(value, torch.Tensor):
        return copy_of(value)
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, Mapping):
        return {key: deep_copy_of(item) for key, item in value.items()}
    if isinstance(value, list):
        return [deep_copy_of(item) for item in value]
    if type(value) is tuple:
        return tuple(deep_copy_of(item) for item in value)
    return value
