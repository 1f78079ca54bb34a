# SPDX-License-Identifier: Apache-2.0
"""Plans a step's reads: which write each entry wants, pinned from the plan until the step is consumed."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from omni_core.prefix_cache.buffers import HostBuffer
from omni_core.prefix_cache.deferred_records import DeferredRecords
from omni_core.prefix_cache.prefetcher import Prefetcher
from omni_core.prefix_cache.reads import GatherBatch, KeyEntries, ReadRequest, StepRead
from omni_core.prefix_cache.slot_table import ABSENT, Slots, SlotTable
from omni_core.prefix_cache.state import CacheState


class ReadPlanner:
    """Every method needs the state lock. `live_reads` is shared with the committer, which looks for pins there."""

    def __init__(
        self,
        state: CacheState,
        table: SlotTable,
        prefetcher: Prefetcher,
        deferred: DeferredRecords,
        live_reads: list[StepRead],
    ) -> None:
        self._state = state
        self._table = table
        self._prefetcher = prefetcher
        self._deferred = deferred
        self._live_reads = live_reads

    def plan(self, label: str, requests: list[ReadRequest]) -> StepRead:
        """Pin the rows of these requests as they are now, and start to gather those that are present."""
        read = StepRead(label, requests)
        for key in self._table.keys:
            read.keys[key] = KeyEntries(self._table.present_ids(key, read.slots))
        self._table.pin(read.stored_slots)
        self._live_reads.append(read)
        self._gather(read, {key: np.flatnonzero(entries.ids) for key, entries in read.keys.items()})
        return read

    def plan_again(self, read: StepRead, written: Slots) -> None:
        """The read's own step has claimed `written`: entries there want the new rows, whatever they wanted before."""
        touched = np.flatnonzero(self._table.members(read.slots, written))
        changed: dict[str, npt.NDArray[np.int64]] = {}
        for key in self._table.keys:
            entries = read.keys.get(key)
            if entries is None:
                entries = read.keys[key] = KeyEntries(np.zeros(len(read.slots), np.int64))
            if len(touched):
                ids = self._table.present_ids(key, read.slots[touched])
                moved = ids != entries.ids[touched]
                entries.replan(touched[moved], ids[moved])
                changed[key] = touched[moved & (ids != ABSENT)]
        self._gather(read, changed)

    def end(self, read: StepRead) -> list[HostBuffer]:
        """Give a read's pins back, once.

        Returns:
            Its buffers, unless the prefetch thread is writing into them: then it returns them itself.
        """
        if read.ended:
            return []
        read.ended = True
        self._table.unpin(read.stored_slots)
        self._live_reads.remove(read)
        self._state.progress.notify_all()
        if read.in_gather:
            return []
        return read.take_buffers() + read.side_buffers()

    def _gather(self, read: StepRead, entries_by_key: Mapping[str, npt.NDArray[np.int64]]) -> None:
        parts = []
        newest = newest_deferred = ABSENT
        for key, entries in entries_by_key.items():
            if len(entries):
                ids = read.keys[key].ids[entries]
                newest = max(newest, int(ids.max()))
                if key in self._deferred.keys:
                    newest_deferred = max(
                        newest_deferred, self._deferred.force_claims(ids, f"a read of {read.step_label}")
                    )
                parts.append((key, entries, ids))
        if parts:
            self._prefetcher.enqueue(GatherBatch(read, tuple(parts), newest, newest_deferred))
