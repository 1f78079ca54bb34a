# SPDX-License-Identifier: Apache-2.0
"""A step's outstanding read of stored rows: which rows, under which write id, and how far their gathering is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from omni_core.prefix_cache.buffers import HostBuffer
from omni_core.prefix_cache.outputs import TokenRange
from omni_core.prefix_cache.slot_table import ABSENT, Slots, WriteIds

_NO_RESCUE = 0
_RESCUE_FLAGGED = 1
_RESCUE_PUBLISHED = 2


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """One request's share of a step's read."""

    req_id: str
    positions: npt.NDArray[np.int64]
    """`(num_rows,)` token positions to read, ascending."""
    slots: Slots
    """`(num_rows,)` the slot of each; -1 where no row was ever stored."""
    tail_rows: int
    """Rows the step itself will add behind them; sizes the output buffer."""


@dataclass(frozen=True, slots=True)
class ReadSpan:
    """Where a request's entries lie in the read, and its rows in the output buffer."""

    positions: npt.NDArray[np.int64]
    entries: slice
    buffer_start: int
    num_rows: int
    tail_rows: int

    @property
    def buffer_rows(self) -> slice:
        """The buffer rows the read fills."""
        return slice(self.buffer_start, self.buffer_start + self.num_rows)


class SideRows:
    """Old rows the committer set aside before it overwrote them."""

    __slots__ = ("buffer", "entries", "ids", "rows")

    def __init__(self, entries: npt.NDArray[np.int64], ids: WriteIds, buffer: HostBuffer, rows: torch.Tensor) -> None:
        self.entries = entries
        self.ids = ids
        self.buffer = buffer
        self.rows = rows


class KeyEntries:
    """The entries of one key: the write id each was planned for, and what became of it."""

    __slots__ = ("ids", "rescue", "resolved", "side_rows")

    def __init__(self, ids: WriteIds) -> None:
        self.ids = ids
        self.resolved: npt.NDArray[np.bool_] = ids == ABSENT
        self.rescue: npt.NDArray[np.int8] = np.zeros(len(ids), np.int8)
        self.side_rows: list[SideRows] = []

    def replan(self, entries: npt.NDArray[np.int64], ids: WriteIds) -> None:
        """Plan these entries again; what was gathered or set aside for their old ids no longer counts."""
        self.ids[entries] = ids
        self.resolved[entries] = ids == ABSENT
        self.rescue[entries] = _NO_RESCUE

    def flag_rescue(self, candidates: npt.NDArray[np.bool_], stamps: WriteIds) -> npt.NDArray[np.int64]:
        """Flag the unresolved candidates whose id is the one now stamped; returns their entry indices."""
        owed = candidates & ~self.resolved & (self.rescue == _NO_RESCUE) & (self.ids == stamps)
        entries = np.flatnonzero(owed)
        self.rescue[entries] = _RESCUE_FLAGGED
        return entries

    def publish(self, side: SideRows) -> None:
        """The set-aside rows may be used by entries that still carry the id they were set aside for."""
        live = (self.ids[side.entries] == side.ids) & (self.rescue[side.entries] == _RESCUE_FLAGGED)
        self.rescue[side.entries[live]] = _RESCUE_PUBLISHED
        self.side_rows.append(side)

    def published(self, among: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Of these entries, those whose rows lie aside."""
        aside: npt.NDArray[np.int64] = among[self.rescue[among] == _RESCUE_PUBLISHED]
        return aside

    def not_published(self, among: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Of these entries, those whose rows do not lie aside."""
        straight: npt.NDArray[np.int64] = among[self.rescue[among] != _RESCUE_PUBLISHED]
        return straight

    def rescue_pending(self, among: npt.NDArray[np.int64]) -> bool:
        """Whether a rescue of any of these entries is flagged and not yet published."""
        return bool((self.rescue[among] == _RESCUE_FLAGGED).any())


class StepRead:
    """All stored rows one step delivers: entries of several requests, flat, one table per key.

    Every method is called with the state lock held, unless it says otherwise. The read is live from its plan until
    `end`; then its pins are gone and its buffers belong to whoever `end` or `take_buffers` gave them to.
    """

    def __init__(self, step_label: str, requests: list[ReadRequest]) -> None:
        """Lay out the entries. No lock needed."""
        self.step_label = step_label
        self.spans: dict[str, ReadSpan] = {}
        entry = buffer_row = 0
        for request in requests:
            rows = len(request.slots)
            self.spans[request.req_id] = ReadSpan(
                request.positions, slice(entry, entry + rows), buffer_row, rows, request.tail_rows
            )
            entry += rows
            buffer_row += rows + request.tail_rows
        self.slots: Slots = np.concatenate([request.slots for request in requests])
        self.buffer_num_rows = buffer_row
        self.stored_slots: Slots = self.slots[self.slots >= 0]
        self.keys: dict[str, KeyEntries] = {}
        self.buffers: dict[str, HostBuffer] = {}
        self.pending_batches = 0
        self.in_gather = False
        self.ended = False
        self.error: BaseException | None = None

    @property
    def complete(self) -> bool:
        """Nothing is left to gather, or it will never be."""
        return self.pending_batches == 0 or self.error is not None

    def buffer_row_of(self, entries: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """For each entry, its row in the output buffer. No lock needed."""
        rows = np.arange(len(self.slots), dtype=np.int64)
        for span in self.spans.values():
            rows[span.entries] += span.buffer_start - span.entries.start
        return rows[entries]

    def absent_hidden(self, key: str) -> list[str]:
        """Requests for which some entry of `key` has no row."""
        ids = self.keys[key].ids
        if ids.all():
            return []
        return [req_id for req_id, span in self.spans.items() if not ids[span.entries].all()]

    def absent_positions(self, req_id: str, key: str) -> npt.NDArray[np.int64]:
        """Positions of the request for which `key` has no row."""
        span = self.spans[req_id]
        absent: npt.NDArray[np.int64] = span.positions[self.keys[key].ids[span.entries] == ABSENT]
        return absent

    def side_buffers(self) -> list[HostBuffer]:
        """Take the set-aside buffers; the read holds none any more."""
        buffers: list[HostBuffer] = []
        for entries in self.keys.values():
            buffers.extend(side.buffer for side in entries.side_rows)
            entries.side_rows = []
        return buffers

    def take_buffers(self) -> list[HostBuffer]:
        """Take the output buffers; the read holds none any more."""
        buffers = list(self.buffers.values())
        self.buffers = {}
        return buffers


@dataclass(frozen=True, slots=True)
class GatherBatch:
    """Entries of one read to be gathered together, with the ids they had when the batch was made."""

    read: StepRead
    parts: tuple[tuple[str, npt.NDArray[np.int64], WriteIds], ...]
    """Per key: entry indices and their write ids, `ABSENT` left out."""
    newest_id: int
    """The batch can be gathered once this write has landed,"""
    newest_record_id: int
    """and the deferred record of this id."""


def ranges_of(positions: npt.NDArray[np.int64]) -> tuple[TokenRange, ...]:
    """Ascending positions as the fewest `[start, stop)` ranges."""
    if len(positions) == 0:
        return ()
    breaks = np.flatnonzero(np.diff(positions) != 1) + 1
    starts = positions[np.concatenate(([0], breaks))]
    stops = positions[np.concatenate((breaks - 1, [len(positions) - 1]))] + 1
    return tuple(zip(starts.tolist(), stops.tolist(), strict=True))
