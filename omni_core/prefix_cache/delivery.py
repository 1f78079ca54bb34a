# SPDX-License-Identifier: Apache-2.0
"""Joins a step's rows with the stored rows in front of them, per request, into recycled host buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from omni_core.prefix_cache.block_pool import RowSpec
from omni_core.prefix_cache.buffers import HostBuffer, HostBufferPool
from omni_core.prefix_cache.outputs import RequestRows, TokenRange
from omni_core.prefix_cache.plain_rows import NOTHING, PlainRows
from omni_core.prefix_cache.reads import ReadSpan, StepRead, ranges_of
from omni_core.prefix_cache.slot_table import ABSENT
from omni_core.prefix_cache.step_inputs import LeftoverShare
from omni_core.prefix_cache.step_record import StepRecord
from omni_core.prefix_cache.task import StagedRows


class BatchRun(NamedTuple):
    """What a step delivers of a request's run: batch index, rows `[first, last)` of the batch, first token position."""

    in_batch: int
    req_id: str
    first: int
    last: int
    position: int

    @property
    def num_rows(self) -> int:
        """Rows the step computed for the request and delivers."""
        return self.last - self.first

    @property
    def token_range(self) -> TokenRange:
        """Positions the step computed for the request and delivers."""
        return (self.position, self.position + self.last - self.first)

    @property
    def ranges(self) -> tuple[TokenRange, ...]:
        """The same as ranges: none if the step delivers no row it computed."""
        return (self.token_range,) if self.last > self.first else ()


@dataclass(frozen=True, slots=True)
class Joined:
    """What `join_step` made: the rows, and the buffers under them."""

    served: Mapping[str, RequestRows]
    buffers: list[HostBuffer]
    rows_computed: int = 0
    """Token positions among `served` whose rows the step computed."""
    rows_from_hits: int = 0
    """Token positions among `served` whose rows were stored."""


def join_step(
    record: StepRecord,
    runs: list[BatchRun],
    reads: dict[str, StepRead],
    specs: dict[str, RowSpec],
    buffers: HostBufferPool,
) -> Joined:
    """Build every request's rows. Any thread; no lock held; the page is host-ready and the reads are complete.

    Args:
        record: the step's staged values.
        runs: the requests to serve.
        reads: for a request with stored rows to join, the read that gathered them.
        specs: rows of the stored keys.
        buffers: where output buffers come from. Buffers of the reads stay the reads' own.
    """
    leased: list[HostBuffer] = []
    joiner = _Joiner(record, reads, specs, buffers, leased)
    try:
        plain = [run for run in runs if run.req_id not in reads] if reads else runs
        rows = iter(joiner.plain_rows(plain))
        leftovers = _share_leftovers(record, runs)
        served = {}
        for run in runs:
            read = reads.get(run.req_id)
            shares = leftovers.get(run.req_id, NOTHING)
            if read is None:
                ranges = ((run.position, run.position + run.last - run.first),) if run.last > run.first else ()
                served[run.req_id] = RequestRows(run.req_id, ranges, next(rows), NOTHING, NOTHING, shares)
            else:
                served[run.req_id] = joiner.joined(run, read, shares)
    except BaseException:
        buffers.give_back(leased)
        raise
    delivered_with_hits = sum(served[req_id].num_rows for req_id in reads)
    computed_with_hits = sum(run.last - run.first for run in runs if run.req_id in reads) if reads else 0
    computed = sum(run.last - run.first for run in runs)
    return Joined(served, leased, computed, delivered_with_hits - computed_with_hits)


def copy_step(
    record: StepRecord,
    req_ids: tuple[str, ...],
    starts: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    buffers: HostBufferPool,
) -> Joined:
    """`join_step` for a step that delivers every row it computed, and nothing else: one copy per key."""
    leased: list[HostBuffer] = []
    columns = {}
    try:
        for staged in record.rows:
            buffer = buffers.lease(staged.rows.shape, staged.rows.dtype)
            leased.append(buffer)
            columns[staged.key] = buffer.kept_view(staged.rows.shape, staged.rows.dtype).copy_(staged.rows)
    except BaseException:
        buffers.give_back(leased)
        raise
    return Joined(PlainRows(req_ids, starts, positions, columns), leased, len(positions))


class _Joiner:
    def __init__(
        self,
        record: StepRecord,
        reads: dict[str, StepRead],
        specs: dict[str, RowSpec],
        buffers: HostBufferPool,
        leased: list[HostBuffer],
    ) -> None:
        self._record = record
        self._staged = {staged.key: staged for staged in record.rows}
        self._specs = specs
        self._buffers = buffers
        self._leased = leased

    def plain_rows(self, runs: list[BatchRun]) -> list[dict[str, torch.Tensor]]:
        """Rows of requests with nothing to join: per key one copy, and one split into a view per request."""
        rows: list[dict[str, torch.Tensor]] = [{} for _ in runs]
        if not runs:
            return rows
        lengths = [run.last - run.first for run in runs]
        total = sum(lengths)
        # Every value of a step has the step's rows; runs come in the batch's order.
        every_row = bool(self._record.rows) and total == len(self._record.rows[0].rows)
        batch_rows = None if every_row else _batch_rows(runs, lengths)
        for staged in self._record.rows:
            for row, view in zip(rows, self._plain_column(staged.rows, total, batch_rows, lengths), strict=True):
                row[staged.key] = view
        return rows

    def _plain_column(
        self, staged: torch.Tensor, total: int, batch_rows: torch.Tensor | None, lengths: list[int]
    ) -> Sequence[torch.Tensor]:
        copied = self._lease((total, *staged.shape[1:]), staged.dtype)
        views = copied.split_with_sizes(lengths)
        if batch_rows is None:
            copied.copy_(staged)
        elif copied.numel():
            spec = RowSpec(tuple(staged.shape[1:]), staged.dtype)
            torch.index_select(_words(staged, spec), 0, batch_rows, out=_words(copied, spec))
        return views

    def joined(self, run: BatchRun, read: StepRead, leftovers: Mapping[str, Any]) -> RequestRows:
        """Stored rows, then the step's rows."""
        span = read.spans[run.req_id]
        rows: dict[str, torch.Tensor] = {}
        key_ranges: dict[str, tuple[TokenRange, ...]] = {}
        zero_ranges: dict[str, tuple[TokenRange, ...]] = {}
        for key, staged in self._staged.items():
            if key not in self._record.stored_keys:
                part = staged.rows[run.first : run.last]
                rows[key] = self._lease(tuple(part.shape), part.dtype).copy_(part)
                key_ranges[key] = run.ranges
        for key, entries in read.keys.items():
            staged_rows = self._staged.get(key)
            absent = entries.ids[span.entries] == ABSENT
            if staged_rows is None and absent.all():
                continue
            rows[key] = self._join_key(run, read, span, key, staged_rows, absent)
            zeros = span.positions[absent]
            if staged_rows is None:
                zeros = np.concatenate((zeros, np.arange(*run.token_range, dtype=np.int64)))
            if len(zeros):
                zero_ranges[key] = ranges_of(zeros)
        if rows.keys().isdisjoint(read.keys):  # no key of the model is stored: nothing stands in front of the step
            return RequestRows(run.req_id, run.ranges, rows, leftovers=leftovers)
        positions = np.concatenate((span.positions, np.arange(*run.token_range, dtype=np.int64)))
        return RequestRows(run.req_id, ranges_of(positions), rows, key_ranges, zero_ranges, leftovers)

    def _join_key(
        self,
        run: BatchRun,
        read: StepRead,
        span: ReadSpan,
        key: str,
        staged: StagedRows | None,
        absent: npt.NDArray[np.bool_],
    ) -> torch.Tensor:
        spec = self._specs[key]
        total = span.num_rows + run.num_rows
        gathered = read.buffers.get(key)
        if gathered is not None and span.tail_rows >= run.num_rows:
            every = gathered.view((read.buffer_num_rows, spec.width), spec.dtype)
            joined = every[span.buffer_start : span.buffer_start + total]
        else:
            joined = self._lease((total, spec.width), spec.dtype)
            if gathered is not None:
                every = gathered.view((read.buffer_num_rows, spec.width), spec.dtype)
                joined[: span.num_rows].copy_(every[span.buffer_rows])
        stored = joined[: span.num_rows].view(spec.word)
        if absent.all():
            stored.zero_()
        elif absent.any():
            stored.index_fill_(0, torch.from_numpy(np.flatnonzero(absent)), 0)
        if staged is None:
            joined[span.num_rows :].view(spec.word).zero_()
        else:
            joined[span.num_rows :].copy_(staged.rows[run.first : run.last].reshape(run.num_rows, spec.width))
        return joined.view(total, *spec.trailing_shape)

    def _lease(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        buffer = self._buffers.lease(shape, dtype)
        self._leased.append(buffer)
        return buffer.view(shape, dtype)


def _batch_rows(runs: list[BatchRun], lengths: list[int]) -> torch.Tensor:
    """int64 `(sum(lengths),)`: the batch rows of these runs, run after run."""
    counts = np.array(lengths, np.int64)
    firsts = np.array([run.first for run in runs], np.int64)
    behind = np.cumsum(counts) - counts
    return torch.from_numpy(np.arange(counts.sum()) + np.repeat(firsts - behind, counts))


def _words(rows: torch.Tensor, spec: RowSpec) -> torch.Tensor:
    """`(len(rows), row_words)`: contiguous rows as the words they are moved in; torch selects rows of few dtypes."""
    return rows.view(len(rows), -1).view(spec.word)


def _share_leftovers(record: StepRecord, runs: list[BatchRun]) -> dict[str, dict[str, object]]:
    shares: dict[str, dict[str, object]] = {}
    for leftover in record.leftovers:
        value = leftover.detached()
        for run in runs:
            if leftover.share is LeftoverShare.SLICE:
                part = value[run.first : run.last]
            elif leftover.share is LeftoverShare.WHOLE:
                part = value
            else:
                part = value[run.in_batch]
            shares.setdefault(run.req_id, {})[leftover.key] = part
    return shares
