# SPDX-License-Identifier: Apache-2.0
"""How far each live request has come, and which rows are still owed to it."""

from __future__ import annotations

from itertools import repeat

import numpy as np
import numpy.typing as npt

from omni_core.prefix_cache.errors import RequestError
from omni_core.prefix_cache.outputs import PartialRequest
from omni_core.prefix_cache.owed import MissingSets, OwedRows
from omni_core.prefix_cache.reads import ranges_of

UNKNOWN = -1
"""Row of a request the table does not know: the last row of each column, which expects no position and has serial 0."""
_EXPECTS_NOTHING = -1
_INITIAL_ROWS = 64


class RequestTable:
    """Live requests as rows of a numpy table. Every method needs the state lock.

    `promised_upto` is the position after the last row promised to the request. It rises when a step is saved and never
    falls; rows of steps that were not delivered go to the request's missing set instead.
    """

    def __init__(self, max_partial_reports: int) -> None:
        self._row_of: dict[str, int] = {}
        self._free: list[int] = []
        self._last_batch: tuple[tuple[str, ...], npt.NDArray[np.int64]] = ((), np.zeros(0, np.int64))
        self._promised_upto = np.full(_INITIAL_ROWS, _EXPECTS_NOTHING, np.int64)
        self._failed = np.zeros(_INITIAL_ROWS, np.bool_)
        self._serials = np.zeros(_INITIAL_ROWS, np.int64)
        self._last_serial = 0
        self._num_rows = 0
        self._errors: dict[str, RequestError] = {}
        self.missing = MissingSets()
        self._max_partial_reports = max_partial_reports
        self._partial: dict[tuple[str, int], list[npt.NDArray[np.int64]]] = {}

    def __len__(self) -> int:
        return len(self._row_of)

    def __contains__(self, req_id: str) -> bool:
        return req_id in self._row_of

    def start(self, req_id: str, promised_upto: int) -> None:
        """Begin to track a request whose first step will bring the rows from `promised_upto` on."""
        if self._free:
            row = self._free.pop()
        else:
            row = self._num_rows
            self._num_rows += 1
            if self._num_rows == len(self._promised_upto):
                blank = np.full_like(self._promised_upto, _EXPECTS_NOTHING)
                self._promised_upto = np.concatenate((self._promised_upto, blank))
                self._failed = np.concatenate((self._failed, np.zeros_like(self._failed)))
                self._serials = np.concatenate((self._serials, np.zeros_like(self._serials)))
        self._forget_batch()
        self._row_of[req_id] = row
        self._last_serial += 1
        self._serials[row] = self._last_serial
        self._promised_upto[row] = promised_upto
        self._failed[row] = False

    def fail(self, error: RequestError) -> bool:
        """The request cannot be served any more: this error is its answer in every later step.

        Returns:
            Whether the request was live and whole until now.
        """
        row = self._row_of.get(error.req_id)
        if row is None or self._failed[row]:
            return False
        self._failed[row] = True
        self._errors[error.req_id] = error
        self.missing.forget(error.req_id)
        return True

    def end(self, req_id: str) -> None:
        """Forget a request that finished or was aborted; what it is still owed becomes a partial report."""
        row = self._row_of.pop(req_id, None)
        if row is None:
            return
        self._forget_batch()
        self._free.append(row)
        self._errors.pop(req_id, None)
        owed = self.missing.forget(req_id)
        if len(owed):
            self._report_partial(req_id, int(self._serials[row]), owed)

    def forget_all(self) -> int:
        """Forget every request (`reset`); returns how many there were."""
        count = len(self._row_of)
        for req_id in list(self._row_of):
            self.end(req_id)
        return count

    def rows(self, req_ids: tuple[str, ...]) -> npt.NDArray[np.int64]:
        """`(len(req_ids),)` table rows, `UNKNOWN` where a request is not live. Not to be written to."""
        known_ids, rows = self._last_batch
        if req_ids != known_ids:
            rows = np.fromiter(map(self._row_of.get, req_ids, repeat(UNKNOWN)), np.int64, len(req_ids))
            self._last_batch = (req_ids, rows)
        return rows

    def unexpected(self, rows: npt.NDArray[np.int64], first_positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Indices of the batch's requests that are unknown, failed, or do not continue where they stopped."""
        wrong: npt.NDArray[np.bool_] = self._promised_upto[rows] != first_positions
        if self._errors:
            wrong |= self._failed[rows]
        (indices,) = wrong.nonzero()
        return indices

    def promised_upto(self, req_id: str) -> int:
        """Where the request's next row is expected."""
        return int(self._promised_upto[self._row_of[req_id]])

    def error(self, req_id: str) -> RequestError | None:
        """Why the request cannot be served, if so."""
        return self._errors.get(req_id)

    def serials(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Which life of its id each row is: ids may be used again after a request ended. 0 for unknown requests."""
        serials: npt.NDArray[np.int64] = self._serials[rows]
        return serials

    def serial(self, req_id: str) -> int:
        """The serial of one request; 0 if it is not live."""
        return int(self._serials[self._row_of.get(req_id, UNKNOWN)])

    def promise(self, rows: npt.NDArray[np.int64], next_positions: npt.NDArray[np.int64]) -> None:
        """A step was saved: its rows are promised. Unknown requests are skipped."""
        self._promised_upto[rows] = next_positions
        self._promised_upto[UNKNOWN] = _EXPECTS_NOTHING

    def _forget_batch(self) -> None:
        self._last_batch = ((), self._last_batch[1][:0])

    def owe(self, req_id: str, serial: int, rows: OwedRows) -> None:
        """These rows were not delivered: add them to the missing set, or report them if that life has ended."""
        if len(rows.positions) == 0 or serial == 0:
            return
        if self.serial(req_id) != serial:
            self._report_partial(req_id, serial, rows.positions)
        elif req_id not in self._errors:
            self.missing.add(req_id, rows)

    def take_partial(self) -> tuple[PartialRequest, ...]:
        """Ended requests with rows never delivered; each life of an id once per call."""
        reports = tuple(
            PartialRequest(req_id, ranges_of(np.sort(np.concatenate(missing))))
            for (req_id, _), missing in self._partial.items()
        )
        self._partial.clear()
        return reports

    def _report_partial(self, req_id: str, serial: int, positions: npt.NDArray[np.int64]) -> None:
        self._partial.setdefault((req_id, serial), []).append(positions)
        if len(self._partial) > self._max_partial_reports:
            del self._partial[next(iter(self._partial))]
