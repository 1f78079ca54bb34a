# SPDX-License-Identifier: Apache-2.0
"""Puts one request's deliveries together by position, and refuses what does not fit."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from omni_core.prefix_cache.config import HIDDEN_KEY
from omni_core.prefix_cache.outputs import TokenRange
from omni_core.sinks.base import RequestEnd, SinkDelivery, SinkRequestEnd
from omni_core.sinks.errors import DuplicateRowsError, RowsGapError, RowsMismatchError
from omni_core.sinks.rows import CollectedRequest, merge_ranges


@dataclass(frozen=True, slots=True)
class _Chunk:
    span: TokenRange
    rows: Mapping[str, torch.Tensor]
    token_ids: npt.NDArray[np.int64]


class RequestCollector:
    """What came for one request so far, sorted by position. One thread only; blocks on nothing."""

    def __init__(self, req_id: str) -> None:
        self._req_id = req_id
        self._starts: list[int] = []
        self._chunks: list[_Chunk] = []
        self._specs: dict[str, tuple[torch.Size, torch.dtype]] = {}
        self._leftovers: dict[str, list[Any]] = {}
        self.nbytes = 0

    def places_for(self, delivery: SinkDelivery) -> Sequence[int]:
        """Where each range of a delivery belongs, if it fits with what came before.

        Raises:
            RowsMismatchError: row counts, widths or dtypes disagree.
            DuplicateRowsError: a position came before.
        """
        self._check_counts(delivery)
        self._check_specs(delivery)
        return [self._place_of(span, delivery.step_id) for span in delivery.ranges]

    def add(self, delivery: SinkDelivery, places: Sequence[int], nbytes: int) -> None:
        """Copy a delivery's rows to where `places_for` says they belong; `nbytes` are counted for it."""
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
        """Everything that came.

        Raises:
            RowsGapError: positions in the middle of a whole request were neither delivered nor declared missing.
            RowsMismatchError: a position is missing though its hidden row was delivered.
        """
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
