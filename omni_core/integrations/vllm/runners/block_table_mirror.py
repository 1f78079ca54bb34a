# SPDX-License-Identifier: Apache-2.0
"""A block table in host memory, kept from the scheduler's news, for a runner that has its own on the device only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class BlockTableMirror:
    """The blocks of every live request, one row each. Grows when needed. Engine thread."""

    def __init__(self, num_rows: int, num_columns: int) -> None:
        """Start without requests, with room for so many of so many blocks."""
        self._rows = np.zeros((max(1, num_rows), max(1, num_columns)), np.int32)
        self._num_blocks = np.zeros(len(self._rows), np.int64)
        self._row_of: dict[str, int] = {}
        self._free = list(range(len(self._rows)))

    @property
    def rows(self) -> npt.NDArray[np.int32]:
        """`(num_rows, num_columns)`: block ids. To be read at once: growing makes another one."""
        return self._rows

    @property
    def num_blocks(self) -> npt.NDArray[np.int64]:
        """`(num_rows,)`: blocks of each row's request."""
        return self._num_blocks

    def rows_of(self, req_ids: Sequence[str]) -> npt.NDArray[np.int64]:
        """`(num_reqs,)`: the row of each request.

        Raises:
            KeyError: a request was never announced, or has ended.
        """
        return np.fromiter(map(self._row_of.__getitem__, req_ids), np.int64, len(req_ids))

    def replace(self, req_id: str, block_ids: Sequence[int]) -> None:
        """A request begins, or comes back, with just these blocks."""
        row = self._row_of.get(req_id)
        if row is None:
            row = self._row_of[req_id] = self._free_row()
        self._num_blocks[row] = 0
        self._write(row, block_ids)

    def append(self, req_id: str, block_ids: Sequence[int]) -> None:
        """A live request got more blocks.

        Raises:
            KeyError: the request was never announced, or has ended.
        """
        self._write(self._row_of[req_id], block_ids)

    def remove(self, req_id: str) -> None:
        """A request ended or was preempted; one that is not known is none of ours."""
        row = self._row_of.pop(req_id, None)
        if row is not None:
            self._free.append(row)

    def _write(self, row: int, block_ids: Sequence[int]) -> None:
        held = int(self._num_blocks[row])
        stop = held + len(block_ids)
        if stop > self._rows.shape[1]:
            self._grow(len(self._rows), max(stop, 2 * self._rows.shape[1]))
        self._rows[row, held:stop] = block_ids
        self._num_blocks[row] = stop

    def _free_row(self) -> int:
        if not self._free:
            self._free.extend(range(len(self._rows), 2 * len(self._rows)))
            self._grow(2 * len(self._rows), self._rows.shape[1])
        return self._free.pop()

    def _grow(self, num_rows: int, num_columns: int) -> None:
        rows = np.zeros((num_rows, num_columns), np.int32)
        rows[: len(self._rows), : self._rows.shape[1]] = self._rows
        num_blocks = np.zeros(num_rows, np.int64)
        num_blocks[: len(self._num_blocks)] = self._num_blocks
        self._rows, self._num_blocks = rows, num_blocks
