# SPDX-License-Identifier: Apache-2.0
"""How far each live request has come, where its rows lie, and which of them are still owed to it."""

from __future__ import annotations

from collections.abc import Collection
from itertools import repeat

import numpy as np
import numpy.typing as npt

from omni_core.prefix_cache.errors import RequestError
from omni_core.prefix_cache.outputs import PartialRequest
from omni_core.prefix_cache.owed import MissingSets, Positions
from omni_core.prefix_cache.progress import UNKNOWN, ProgressTable
from omni_core.prefix_cache.reads import ranges_of
from omni_core.prefix_cache.slot_table import NO_ADAPTER, Slots, WriteIds

_NOTHING_WITHHELD: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)


class _BlockTable:
    """A live request's blocks, and the last id given out when each came to it; its complement for withheld blocks."""

    __slots__ = ("_block_ids", "_since", "_withholds")

    def __init__(self, block_ids: Collection[int], since: int, withheld: npt.NDArray[np.bool_]) -> None:
        self._block_ids = list(block_ids)
        self._since = [since] * len(block_ids)
        self._withholds = bool(withheld.any())
        for index in np.flatnonzero(withheld).tolist():
            self._since[index] = ~since

    def extend(self, block_ids: Collection[int], since: int) -> None:
        self._block_ids.extend(block_ids)
        self._since.extend([since] * len(block_ids))

    def withheld(self) -> dict[int, int]:
        if not self._withholds:
            return {}
        return {block_id: ~since for block_id, since in zip(self._block_ids, self._since, strict=True) if since < 0}

    def slots(self, positions: Positions, block_size: int) -> tuple[Slots, WriteIds]:
        indices = positions // block_size
        inside = indices < len(self._block_ids)
        slots = np.full(len(positions), -1, np.int64)
        since = np.zeros(len(positions), np.int64)
        blocks = np.array(self._block_ids, np.int64)[indices[inside]]
        slots[inside] = blocks * block_size + positions[inside] % block_size
        since[inside] = np.array(self._since, np.int64)[indices[inside]]
        return slots, since


class RequestTable:
    """Live requests by id. Every method needs the state lock.

    How far each has come is kept in `progress`, one row of numpy tables per request; what it was promised and not given
    is in `missing`. Ids may be used again: each life of an id, and each version of its content, has its own serial.
    """

    def __init__(self, block_size: int, max_partial_reports: int) -> None:
        self._block_size = block_size
        self._row_of: dict[str, int] = {}
        self._last_batch: tuple[tuple[str, ...], npt.NDArray[np.int64]] = ((), np.zeros(0, np.int64))
        self._block_tables: dict[str, _BlockTable] = {}
        self._errors: dict[str, RequestError] = {}
        self.progress = ProgressTable()
        self.missing = MissingSets()
        self._max_reports = max_partial_reports
        self._partial: dict[tuple[str, int], list[Positions]] = {}
        self._replaced: dict[int, None] = {}
        self.adapters: dict[str, int] = {}
        """Which adapter computes the rows of a live request; the others are the bare model's."""
        self._lives: dict[str, int] = {}
        self._num_lives = 0

    def __len__(self) -> int:
        return len(self._row_of)

    def __contains__(self, req_id: str) -> bool:
        return req_id in self._row_of

    # -- life ---------------------------------------------------------------------------------------------------------

    def start(
        self,
        req_id: str,
        block_ids: Collection[int],
        hit: int,
        since: int,
        withheld: npt.NDArray[np.bool_] = _NOTHING_WITHHELD,
        adapter_id: int = NO_ADAPTER,
    ) -> None:
        """Begin to track a request whose first `hit` rows are promised from the store.

        `since` is the last id given out: the request holds these blocks as long as none has a later tenancy.
        `withheld` says which blocks of its hit it must not read, `adapter_id` who computes its rows.
        """
        self._forget_batch()
        self.life(req_id)
        self._row_of[req_id] = self.progress.add(hit, self._block_end(hit))
        self._block_tables[req_id] = _BlockTable(block_ids, since, withheld)
        if adapter_id != NO_ADAPTER:
            self.adapters[req_id] = adapter_id

    def life(self, req_id: str) -> int:
        """Which life of its id the request is in, or will be once it starts: the same for every content version."""
        life = self._lives.get(req_id)
        if life is None:
            self._num_lives += 1
            life = self._lives[req_id] = self._num_lives
        return life

    def extend(self, req_id: str, block_ids: Collection[int], since: int) -> None:
        """Append blocks to a request's table; nothing happens if it is not live."""
        table = self._block_tables.get(req_id)
        if table is not None:
            table.extend(block_ids, since)

    def resume(
        self, req_id: str, block_ids: Collection[int], hit: int, since: int, withheld: npt.NDArray[np.bool_]
    ) -> None:
        """The live request goes on at `hit` with another block table; rows promised before stay promised."""
        self._block_tables[req_id] = _BlockTable(block_ids, since, withheld)
        self.progress.resume(self._row_of[req_id], hit, self._block_end(hit))

    def replace(self, req_id: str) -> None:
        """End this version of a live request's content: nothing of it is owed or reported any more."""
        serial = self.serial(req_id)
        self.missing.forget(req_id)
        self._partial.pop((req_id, serial), None)
        self._replaced[serial] = None
        if len(self._replaced) > self._max_reports:
            del self._replaced[next(iter(self._replaced))]
        life, adapter_id = self.life(req_id), self.adapters.get(req_id, NO_ADAPTER)
        self.end(req_id)
        self._lives[req_id] = life
        if adapter_id != NO_ADAPTER:
            self.adapters[req_id] = adapter_id

    def fail(self, error: RequestError) -> bool:
        """The request cannot be served any more: this error is its answer in every later step.

        Returns:
            Whether the request was live and whole until now.
        """
        row = self._row_of.get(error.req_id)
        if row is None or error.req_id in self._errors:
            return False
        self.progress.fail(row)
        self._errors[error.req_id] = error
        self.missing.forget(error.req_id)
        return True

    def end(self, req_id: str) -> None:
        """Forget a request that finished or was aborted; what it is still owed becomes a partial report."""
        row = self._row_of.pop(req_id, None)
        if row is None:
            return
        self._forget_batch()
        self._lives.pop(req_id, None)
        if self.adapters:
            self.adapters.pop(req_id, None)
        serial = self.progress.serial(row)
        self.progress.remove(row)
        del self._block_tables[req_id]
        self._errors.pop(req_id, None)
        owed = self.missing.forget(req_id)
        if len(owed):
            self._report_partial(req_id, serial, owed)

    def forget_all(self) -> int:
        """Forget every request (`reset`); returns how many there were."""
        count = len(self._row_of)
        for req_id in list(self._row_of):
            self.end(req_id)
        return count

    # -- looking up ---------------------------------------------------------------------------------------------------

    def row(self, req_id: str) -> int:
        """The request's row of `progress`; `UNKNOWN` if it is not live."""
        return self._row_of.get(req_id, UNKNOWN)

    def rows(self, req_ids: tuple[str, ...]) -> npt.NDArray[np.int64]:
        """`(len(req_ids),)` rows of `progress`, `UNKNOWN` where a request is not live. Not to be written to."""
        known_ids, rows = self._last_batch
        if req_ids != known_ids:
            rows = np.fromiter(map(self._row_of.get, req_ids, repeat(UNKNOWN)), np.int64, len(req_ids))
            self._last_batch = (req_ids, rows)
        return rows

    def serial(self, req_id: str) -> int:
        """Which life and version of its id the request is in; 0 if it is not live."""
        return self.progress.serial(self.row(req_id))

    def promised_upto(self, req_id: str) -> int:
        """The position after the last row promised to the live request."""
        return self.progress.promised_upto(self._row_of[req_id])

    def computed_upto(self, req_id: str) -> int:
        """Where the live request's next run has to start."""
        return self.progress.computed_upto(self._row_of[req_id])

    def error(self, req_id: str) -> RequestError | None:
        """Why the request cannot be served, if so."""
        return self._errors.get(req_id)

    def withheld_blocks(self, req_id: str) -> dict[int, int]:
        """Blocks whose rows a live request must not read, and since which id it holds each."""
        return self._block_tables[req_id].withheld()

    def slots(self, req_id: str, positions: Positions) -> tuple[Slots, WriteIds]:
        """Where these rows of a live request lie, -1 beyond its block table, and since which id it holds each block."""
        return self._block_tables[req_id].slots(positions, self._block_size)

    # -- undelivered rows ---------------------------------------------------------------------------------------------

    def owe(self, req_id: str, serial: int, positions: Positions) -> None:
        """These rows were not delivered: add them to the missing set, or report them if that life has ended."""
        if len(positions) == 0 or serial == 0 or serial in self._replaced:
            return
        if self.serial(req_id) != serial:
            self._report_partial(req_id, serial, positions)
        elif req_id not in self._errors:
            self.missing.add(req_id, positions)

    def take_partial(self) -> tuple[PartialRequest, ...]:
        """Ended requests with rows never delivered; each life of an id once per call."""
        reports = tuple(
            PartialRequest(req_id, ranges_of(np.sort(np.concatenate(missing))))
            for (req_id, _), missing in self._partial.items()
        )
        self._partial.clear()
        return reports

    def _report_partial(self, req_id: str, serial: int, positions: Positions) -> None:
        self._partial.setdefault((req_id, serial), []).append(positions)
        if len(self._partial) > self._max_reports:
            del self._partial[next(iter(self._partial))]

    def _block_end(self, position: int) -> int:
        """The position after the block that a hit ends inside; `position` itself at a block's end."""
        return -(-position // self._block_size) * self._block_size

    def _forget_batch(self) -> None:
        self._last_batch = ((), self._last_batch[1][:0])
