# SPDX-License-Identifier: Apache-2.0
"""Puts rows into the pool, and sets aside those it overwrites that a read still wants."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from omni_core.prefix_cache.block_pool import PrefixBlockPool
from omni_core.prefix_cache.buffers import HostBufferPool
from omni_core.prefix_cache.reads import SideRows, StepRead
from omni_core.prefix_cache.slot_table import SlotTable
from omni_core.prefix_cache.state import CacheState
from omni_core.prefix_cache.task import PoolRows, StagedRows
from omni_core.runtime import Runtime


@dataclass(frozen=True, slots=True)
class _Rescue:
    """Entries of one read whose rows must be set aside before they are overwritten."""

    read: StepRead
    key: str
    entries: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int64]
    """The ids flagged: the engine may plan an entry again while the copy runs."""


class PoolWriter:
    """The physical state of the pool. Committer thread only, no lock held; whole writes, in the order of claims."""

    def __init__(
        self,
        state: CacheState,
        table: SlotTable,
        pool: PrefixBlockPool,
        buffers: HostBufferPool,
        live_reads: list[StepRead],
        runtime: Runtime,
    ) -> None:
        self._state = state
        self._table = table
        self._pool = pool
        self._buffers = buffers
        self._live_reads = live_reads
        self._runtime = runtime
        self._last_row = table.writer_numbers
        self.rows_rescued = 0

    def write(self, write_id: int, slots: npt.NDArray[np.int64], staged: Iterable[StagedRows]) -> None:
        """Write rows of several keys to the same slots, as write `write_id`.

        Args:
            write_id: what the rows are claimed under.
            slots: flat pool slots; -1 is not written, and of a slot named twice the later row is.
            staged: of each key `len(slots)` rows.
        """
        order = self._last_rows(slots)
        if order is not None:
            slots = slots[order]
        if len(slots) == 0:
            return
        words_by_key = {one.key: one.words(self._pool.spec(one.key)) for one in staged}
        if order is not None:
            picked = torch.from_numpy(order)
            words_by_key = {key: words.index_select(0, picked) for key, words in words_by_key.items()}
        self._overwrite(tuple(words_by_key), slots, words_by_key, write_id)

    def copy(self, write_id: int, part: PoolRows) -> None:
        """Copy rows of one key from slots of the pool to others, as write `write_id`."""
        spec = self._pool.spec(part.key)
        shape = (len(part.source_slots), spec.row_words)
        buffer = self._buffers.lease(shape, spec.word)
        rows = buffer.view(shape, spec.word)
        self._pool.gather(part.key, part.source_slots, rows)
        self._overwrite((part.key,), part.destination_slots, {part.key: rows}, write_id)
        self._buffers.give_back([buffer])

    def _overwrite(
        self, keys: tuple[str, ...], slots: npt.NDArray[np.int64], rows: Mapping[str, torch.Tensor], write_id: int
    ) -> None:
        with self._state.lock:
            rescues = self._flag_rescues(keys, slots)
        sides = [self._set_aside(rescue) for rescue in rescues]
        self._runtime.checkpoint("committer.set_aside")
        with self._state.lock:
            leftover_buffers = []
            for rescue, side in zip(rescues, sides, strict=True):
                if rescue.read.ended:
                    leftover_buffers.append(side.buffer)
                else:
                    rescue.read.keys[rescue.key].publish(side)
            self._table.stamp(keys, slots, write_id)
            if rescues:
                self._state.progress.notify_all()
        self._buffers.give_back(leftover_buffers)
        self._runtime.checkpoint("committer.write")
        for key in keys:
            self._pool.scatter(key, slots, rows[key])
        self._runtime.checkpoint("committer.written")

    def _flag_rescues(self, keys: tuple[str, ...], slots: npt.NDArray[np.int64]) -> list[_Rescue]:
        if not self._table.any_pinned(slots):
            return []
        rescues = []
        for read in self._live_reads:
            overwritten = self._table.members(read.slots, slots)
            if not overwritten.any():
                continue
            for key in keys:
                entries = read.keys.get(key)
                if entries is None:
                    continue
                flagged = entries.flag_rescue(overwritten, self._table.stamps(key, read.slots))
                if len(flagged):
                    rescues.append(_Rescue(read, key, flagged, entries.ids[flagged]))
        return rescues

    def _set_aside(self, rescue: _Rescue) -> SideRows:
        spec = self._pool.spec(rescue.key)
        shape = (len(rescue.entries), spec.row_words)
        buffer = self._buffers.lease(shape, spec.word)
        rows = buffer.view(shape, spec.word)
        self._pool.gather(rescue.key, rescue.read.slots[rescue.entries], rows)
        self.rows_rescued += len(rescue.entries)
        return SideRows(rescue.entries, rescue.ids, buffer, rows)

    def _last_rows(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
        """Rows to write, in order: padding slots left out, of a slot named twice the later row; `None` means all."""
        rows = np.arange(len(slots), dtype=np.int32)
        stored = slots >= 0
        self._last_row[slots[stored]] = rows[stored]
        kept = stored & (self._last_row[slots] == rows)
        return None if kept.all() else np.flatnonzero(kept)
