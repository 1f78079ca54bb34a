# SPDX-License-Identifier: Apache-2.0
"""How far live requests have come, as numpy columns: one expression per step, whatever the number of requests."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

UNKNOWN = -1
"""Row of a request nobody knows: the last row of each column, which expects no position and has serial 0."""
_EXPECTS_NOTHING = -1
_INITIAL_ROWS = 64

_NO_ROWS: npt.NDArray[np.int64] = np.zeros(0, np.int64)

Rows = npt.NDArray[np.int64]
Column = npt.NDArray[np.int64]


class ProgressTable:
    """One row per live request. Every method needs the state lock.

    `computed_upto` is where the request's next run has to start. `promised_upto` is the position after the last row
    promised to it: it rises when a step is saved, or a hit is read, and falls only when drafts are rejected. Between
    the two lie rows that are computed again after a preemption; they are not delivered again. `draft_floor` is the
    least position at which the next run may start because drafts of the last one were rejected. Below `written_upto`
    rows may lie in the request's blocks: what a run computes there takes the place of rows of rejected drafts, or of
    what its first block held of another content.
    """

    def __init__(self) -> None:
        self._columns: npt.NDArray[np.int64] = np.zeros((5, _INITIAL_ROWS), np.int64)
        self._failed: npt.NDArray[np.bool_] = np.zeros(_INITIAL_ROWS, np.bool_)
        self._num_failed = 0
        self._num_recomputing = 0
        self._free: list[int] = []
        self._num_rows = 0
        self._last_serial = 0
        self._name_columns()
        self._expect_nothing(UNKNOWN)

    def _name_columns(self) -> None:
        self._computed, self._promised, self._draft_floor, self._written, self._serials = self._columns

    def _expect_nothing(self, row: int) -> None:
        self._columns[:4, row] = _EXPECTS_NOTHING

    def add(self, hit: int, written_upto: int) -> int:
        """A request begins: its rows below `hit` are promised, its first run starts there. Returns its row."""
        if self._free:
            row = self._free.pop()
        else:
            row = self._num_rows
            self._num_rows += 1
            if self._num_rows == len(self._failed):
                self._columns = np.concatenate((self._columns, np.zeros_like(self._columns)), axis=1)
                self._failed = np.concatenate((self._failed, np.zeros_like(self._failed)))
                self._name_columns()
                self._expect_nothing(UNKNOWN)
        self._last_serial += 1
        self._columns[:, row] = (hit, hit, hit, written_upto, self._last_serial)
        self._failed[row] = False
        return row

    def remove(self, row: int) -> None:
        """The request is over; its row may be given to another."""
        self._num_failed -= int(self._failed[row])
        self._num_recomputing -= int(self._promised[row] > self._computed[row])
        self._failed[row] = False
        self._columns[:, row] = 0
        self._free.append(row)

    def fail(self, row: int) -> None:
        """From now on every run of the request is unexpected."""
        self._num_failed += 1 - int(self._failed[row])
        self._failed[row] = True

    def serial(self, row: int) -> int:
        """Which life and version of its id the request is in; 0 for `UNKNOWN`."""
        return int(self._serials[row])

    def serials(self, rows: Rows) -> Column:
        """The same for several rows."""
        serials: Column = self._serials[rows]
        return serials

    def promised_upto(self, row: int) -> int:
        """The position after the last row promised to the request."""
        return int(self._promised[row])

    def computed_upto(self, row: int) -> int:
        """Where the request's next run has to start."""
        return int(self._computed[row])

    def has_unsettled_drafts(self, row: int) -> bool:
        """Whether the request's last run had drafts, and no later run says how many were accepted."""
        return bool(self._draft_floor[row] < self._computed[row])

    def unsettled(self, row: int) -> range:
        """Positions of the request's last run that were computed for drafts nobody has counted in a run or event."""
        return range(int(self._draft_floor[row]), int(self._computed[row]))

    def settle_drafts(self, row: int, end: int) -> None:
        """Rows at or beyond `end` were computed for drafts that were rejected."""
        end = max(end, int(self._draft_floor[row]))
        self._promised[row] = min(int(self._promised[row]), end)

    def resume(self, row: int, hit: int, written_upto: int) -> None:
        """The next run starts at `hit`; rows below it that were not promised yet are promised now."""
        self._num_recomputing -= int(self._promised[row] > self._computed[row])
        promised = max(hit, int(self._promised[row]))
        self._columns[:4, row] = (hit, promised, hit, written_upto)
        self._num_recomputing += int(promised > hit)

    def rewritten(self, rows: Rows, firsts: Column, starts: Column, positions: Column) -> npt.NDArray[np.bool_] | None:
        """`(num_tokens,)`: rows of a batch whose slots may hold rows of other content; `None`: none of any."""
        written = self._written[rows]
        if not np.count_nonzero(written > firsts):
            return None
        again: npt.NDArray[np.bool_] = positions < np.repeat(written, np.diff(starts))
        return again

    def left_behind(self, rows: Rows, ends: Column) -> list[tuple[int, range]]:
        """Indices of the batch's requests with rows of other content beyond their run's end, and the positions."""
        written = self._written[rows]
        (indices,) = (written > ends).nonzero()
        return [(index, range(int(ends[index]), int(written[index]))) for index in indices.tolist()]

    def unexpected(self, rows: Rows, firsts: Column) -> npt.NDArray[np.int64]:
        """Indices of the batch's requests that are unknown, failed, or do not continue where they stopped.

        A run that starts where drafts were rejected continues; the rows promised beyond its start never existed.
        """
        wrong: npt.NDArray[np.bool_] = self._computed[rows] != firsts
        num_wrong = np.count_nonzero(wrong)
        if not num_wrong and not self._num_failed:
            return _NO_ROWS
        if num_wrong:
            (suspects,) = wrong.nonzero()
            rejected = self._take_back_drafts(rows[suspects], firsts[suspects])
            wrong[suspects[rejected]] = False
        if self._num_failed:
            wrong |= self._failed[rows]
        (indices,) = wrong.nonzero()
        return indices

    def _take_back_drafts(self, rows: Rows, firsts: Column) -> npt.NDArray[np.bool_]:
        rejected: npt.NDArray[np.bool_] = (firsts < self._computed[rows]) & (firsts >= self._draft_floor[rows])
        rows, firsts = rows[rejected], firsts[rejected]
        self._num_recomputing -= int((self._promised[rows] > self._computed[rows]).sum())
        self._computed[rows] = firsts
        self._promised[rows] = np.minimum(self._promised[rows], firsts)
        return rejected

    def promised_before(self, rows: Rows, firsts: Column, ends: Column) -> Column | None:
        """How many rows of each run were promised before, counted from its start; `None`: none of any."""
        if not self._num_recomputing:
            return None
        again: Column = np.clip(self._promised[rows] - firsts, 0, ends - firsts)
        return again if again.any() else None

    def promise(self, rows: Rows, ends: Column, draft_floors: Column) -> None:
        """A step was saved: its rows are promised. Unknown requests are skipped."""
        if self._num_recomputing:
            recomputing = int((self._promised[rows] > self._computed[rows]).sum())
            promised = np.maximum(self._promised[rows], ends)
            self._num_recomputing += int((promised > ends).sum()) - recomputing
            self._promised[rows] = promised
        else:
            self._promised[rows] = ends
        self._computed[rows] = ends
        self._written[rows] = ends
        self._draft_floor[rows] = draft_floors
        self._expect_nothing(UNKNOWN)
