# SPDX-License-Identifier: Apache-2.0
"""Deferred records that wait on the device, and what makes them leave it: an end, a read, a consumer, or pressure."""

from __future__ import annotations

from collections import deque
from itertools import islice

import numpy as np

from omni_core.prefix_cache.committer import Committer
from omni_core.prefix_cache.deferred_copier import DeferredCopier
from omni_core.prefix_cache.deferred_memory import DeferredMemory
from omni_core.prefix_cache.open_writes import Column, OpenWrites
from omni_core.prefix_cache.slot_table import ABSENT, WriteIds
from omni_core.prefix_cache.task import DeferredRecord, TaskState, WriteTask

_SHOWN_WRITES = 8
"""Open writes an error names; the others are counted."""


class DeferredRecords:
    """The tables of the deferred path. Every method needs the state lock; none blocks, copies or touches a tensor.

    Records leave oldest first and none is passed over, so that of one key claims land in the order they were made.
    """

    def __init__(self, committer: Committer, copier: DeferredCopier) -> None:
        self._committer = committer
        self._copier = copier
        self._memory: DeferredMemory | None = None
        self._open: deque[DeferredRecord] = deque()
        self._writes = OpenWrites()
        self.keys: frozenset[str] = frozenset()
        """Keys whose rows may be deferred."""
        self.forced_upto = 0
        """Every record with a write id up to this is on the committer's queue, or further."""

    # -- the device's room --------------------------------------------------------------------------------------------

    def defer(self, keys: frozenset[str], memory: DeferredMemory | None) -> None:
        """Rows of `keys` may wait in `memory`; without any they never wait. Before the first step."""
        self.keys = keys
        self._memory = memory
        if memory is not None:
            self._copier.use(memory)

    @property
    def charged_bytes(self) -> int:
        """Bytes of records on the device."""
        return 0 if self._memory is None else self._memory.ring.charged_bytes

    @property
    def num_charged(self) -> int:
        """How many records are on the device."""
        return 0 if self._memory is None else self._memory.ring.num_charged

    @property
    def writes_open(self) -> int:
        """Requests that have a deferred write open. Walks the table; for `stats()` only."""
        return self._writes.count(self.forced_upto)

    def open_writes(self) -> str:
        """The open writes in words, for errors; empty if there are none."""
        named = dict.fromkeys(
            f"deferred write {write_n} of request {req_id!r} ({TaskState.PENDING.name})"
            for record in self._open
            for req_id, write_n in zip(record.req_ids, record.write_ns.tolist(), strict=True)
        )
        shown = list(named)[:_SHOWN_WRITES]
        if len(named) > len(shown):
            shown.append(f"and {len(named) - len(shown)} more")
        return ", ".join(shown)

    # -- a step is saved ----------------------------------------------------------------------------------------------

    def add(self, record: DeferredRecord, rows: Column, serials: Column) -> None:
        """A step was saved: its record, already registered, waits from now on.

        Args:
            record: of a later step than all before.
            rows: rows of the request table, per request of the record; -1 for requests it does not know.
            serials: which life of its row each is.
        """
        record.write_ns = self._writes.append(rows, serials, record.write_id, self.forced_upto)
        self._open.append(record)

    def relieve_pressure(self, nbytes: int) -> None:
        """Force the oldest records until there is, or will be, room for one more of `nbytes`."""
        if self._memory is None:
            return
        ring = self._memory.ring
        count = 0
        for record in self._open:
            if ring.would_fit(nbytes, record.ticket):
                break
            count += 1
        if count:
            self._force(count, f"deferred records, for room in device_staging_bytes ({_records(count)})")

    # -- forcing ------------------------------------------------------------------------------------------------------

    def force_claims(self, claims: WriteIds, why: str) -> int:
        """Queue every record that these claimed rows lie in, and all older ones.

        A row whose last claim is of no record has none in a waiting record: whoever made that claim queued it before.

        Returns:
            The record to wait for: when records up to it have landed, all the rows have, as far as they were deferred.
        """
        newest = int(claims.max(initial=ABSENT))
        if self._open and self._open[0].write_id <= newest:
            waiting = np.fromiter((record.write_id for record in self._open), np.int64, len(self._open))
            wanted = claims[np.isin(claims, waiting)]
            if wanted.size:
                self.force_through(int(wanted.max()), why)
        if self.forced_upto > self._copier.landed_upto:
            self._committer.hurry()
        return min(newest, self.forced_upto)

    def force_through(self, write_id: int, why: str) -> None:
        """Queue every record with an id up to `write_id`, in one task."""
        count = self._count_through(write_id)
        if count:
            self._force(count, f"deferred records, for {why} ({_records(count)})")
        elif self.forced_upto > self._copier.landed_upto:
            self._committer.hurry()

    def force_all(self, why: str) -> int:
        """Queue every open record; returns the record to wait for."""
        if self._open:
            self.force_through(self._open[-1].write_id, why)
        elif self.forced_upto > self._copier.landed_upto:
            self._committer.hurry()
        return self.forced_upto

    def force_ended(self, req_id: str, row: int, serial: int) -> None:
        """A request ends: queue every record up to its last one, which nobody waits for yet.

        `row` and `serial` are those of the request table.
        """
        count = self._count_through(self._writes.last_record(row, serial))
        if count:
            write_n = self._writes.write_n(row)
            label = f"deferred write {write_n} of request {req_id!r} ({_records(count)})"
            self._force(count, label, patiently=True)

    def drop_open(self) -> int:
        """Give up every record that was not forced, and forget all writes (`reset`, `close`); returns how many."""
        count = len(self._open)
        while self._open:
            record = self._open.popleft()
            self.forced_upto = record.write_id
            self._copier.give_up(record)
        self._writes.close_all()
        return count

    def _count_through(self, write_id: int) -> int:
        if not self._open or self._open[0].write_id > write_id:
            return 0
        if self._open[-1].write_id <= write_id:
            return len(self._open)
        return sum(record.write_id <= write_id for record in self._open)

    def _force(self, count: int, label: str, *, patiently: bool = False) -> None:
        records = tuple(islice(self._open, count))
        if count == len(self._open):
            self._open.clear()
        else:
            for _ in records:
                self._open.popleft()
        DeferredRecord.transition_all(records, TaskState.QUEUED)
        self.forced_upto = records[-1].write_id
        task = WriteTask(label, self.forced_upto)
        task.records = records
        self._committer.enqueue(task, patiently=patiently)


def _records(count: int) -> str:
    return "1 record" if count == 1 else f"{count} records"
