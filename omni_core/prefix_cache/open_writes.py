# SPDX-License-Identifier: Apache-2.0
"""Which deferred write each live request has open, and how far it reaches: columns beside the request table's."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.int64]

_INITIAL_ROWS = 64


class OpenWrites:
    """One deferred write per request, made of records. Every method needs the state lock.

    A write is open while its last record has not been forced; the next record of the request then opens the next one.
    Rows are those of the request table; its row -1, of requests it does not know, is the last one here too. A row whose
    serial has changed belongs to another request.
    """

    def __init__(self) -> None:
        self._serials: Column = np.zeros(_INITIAL_ROWS, np.int64)
        self._last_record: Column = np.zeros(_INITIAL_ROWS, np.int64)
        self._write_n: Column = np.zeros(_INITIAL_ROWS, np.int64)
        self._last_batch: Column | None = None
        self._last_write_ns: Column = np.zeros(0, np.int64)
        self._last_id = 0

    def append(self, rows: Column, serials: Column, record_id: int, forced_upto: int) -> Column:
        """Record `record_id` has rows of these requests.

        Args:
            rows: `(num_reqs,)` rows of the request table, -1 for requests it does not know. The table gives the same
                array out for as long as the batch and the lives in it are the same.
            serials: `(num_reqs,)` which life of its row each request is.
            record_id: the record's write id.
            forced_upto: the last record that was forced; the writes that ended there are closed.

        Returns:
            `(num_reqs,)` the number of the write that the record belongs to, per request; the first is 1.
        """
        if rows is not self._last_batch:
            self._grow(int(rows.max()) + 2)
            closed = self._last_record[rows] <= forced_upto
            write_ns = np.where(self._serials[rows] == serials, self._write_n[rows] + closed, 1)
            self._write_n[rows] = write_ns
            self._serials[rows] = serials
            self._last_batch, self._last_write_ns = rows, write_ns
        elif self._last_id <= forced_upto:
            self._last_write_ns = self._last_write_ns + 1
            self._write_n[rows] = self._last_write_ns
        self._last_record[rows] = record_id
        self._last_id = record_id
        return self._last_write_ns

    def last_record(self, row: int, serial: int) -> int:
        """The last record with rows of the request; 0 if there was none."""
        if row < 0 or row >= len(self._serials) - 1 or self._serials[row] != serial:
            return 0
        return int(self._last_record[row])

    def write_n(self, row: int) -> int:
        """The number of the request's last write."""
        return int(self._write_n[row])

    def count(self, forced_upto: int) -> int:
        """How many known requests have a write open. Walks the columns; for `stats()` only."""
        return int(np.count_nonzero(self._last_record[:-1] > forced_upto))

    def close_all(self) -> None:
        """Forget every write (`reset`)."""
        for column in (self._serials, self._last_record, self._write_n):
            column[:] = 0
        self._last_batch = None

    def _grow(self, num_rows: int) -> None:
        while num_rows > len(self._serials):
            blank = np.zeros_like(self._serials)
            self._serials = np.concatenate((self._serials, blank))
            self._last_record = np.concatenate((self._last_record, blank))
            self._write_n = np.concatenate((self._write_n, blank))
