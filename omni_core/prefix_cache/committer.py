# SPDX-License-Identifier: Apache-2.0
"""The one thread that writes the pool: lands claims in claim order, and sets aside old rows that a read still wants."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from omni_core.backend import DeviceBackend, DeviceCopyError, Event
from omni_core.prefix_cache.block_pool import PrefixBlockPool
from omni_core.prefix_cache.buffers import HostBufferPool
from omni_core.prefix_cache.reads import SideRows, StepRead
from omni_core.prefix_cache.slot_table import SlotTable
from omni_core.prefix_cache.staging import StagingBufferPool, StagingSlot
from omni_core.prefix_cache.state import CacheState
from omni_core.prefix_cache.task import TaskState, WriteTask
from omni_core.runtime import Runtime

logger = logging.getLogger(__name__)

TASK_HOLDER = "write"
"""The name under which a write task holds its staging slot."""
_ABANDONED_WAIT_S = 1.0
"""How long an idle committer waits at a time for a copy whose rows nobody wants."""


@dataclass(frozen=True, slots=True)
class _Rescue:
    """Entries of one read whose rows must be set aside before they are overwritten."""

    read: StepRead
    key: str
    entries: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int64]
    """The ids flagged: the engine may plan an entry again while the copy runs."""


class Committer:
    """Owns the physical state of the pool. `enqueue`, `drop_queue` and the properties need the state lock held."""

    def __init__(
        self,
        state: CacheState,
        table: SlotTable,
        pool: PrefixBlockPool,
        staging: StagingBufferPool,
        buffers: HostBufferPool,
        live_reads: list[StepRead],
        backend: DeviceBackend,
        runtime: Runtime,
        join_timeout_s: float,
    ) -> None:
        self._state = state
        self._table = table
        self._pool = pool
        self._staging = staging
        self._buffers = buffers
        self._live_reads = live_reads
        self._backend = backend
        self._runtime = runtime
        self._join_timeout_s = join_timeout_s
        self._queue: deque[WriteTask] = deque()
        self._current: WriteTask | None = None
        self._paused = False
        self._bound = False
        self._abandoned: list[tuple[StagingSlot, Event]] = []
        self._last_row = np.zeros(table.num_slots, np.int32)
        self.landed_upto = 0
        """Every write with an id up to this has landed."""
        self.rows_rescued = 0
        self.rows_written = 0
        self._thread = runtime.spawn("omni-core-committer", self._run)

    @property
    def writing(self) -> bool:
        """A write is under way."""
        return self._current is not None

    @property
    def abandoned_slots(self) -> tuple[int, ...]:
        """Staging slots kept out of use because a copy into them may still run."""
        return tuple(slot.index for slot, _ in self._abandoned)

    @property
    def open_tasks(self) -> tuple[WriteTask, ...]:
        """Writes that have not ended, oldest first."""
        return (*((self._current,) if self._current else ()), *self._queue)

    def enqueue(self, task: WriteTask) -> None:
        """Queue a claimed write. Claims are queued in the order of their ids."""
        task.transition(TaskState.QUEUED)
        if task.staging_slot is not None:
            task.staging_slot.hold(TASK_HOLDER)
        self._queue.append(task)
        self._state.committer_work.notify_all()

    def abandon(self, slot: StagingSlot, copy_done: Event) -> None:
        """Nobody wants the rows of this copy any more: keep its page out of use until the copy has ended."""
        slot.hold(TASK_HOLDER)
        self._abandoned.append((slot, copy_done))
        self._state.committer_work.notify_all()

    def pause(self) -> None:
        """Begin no further write until `go_on`; the one under way goes on."""
        self._paused = True

    def go_on(self) -> None:
        """Undo `pause`."""
        self._paused = False
        self._state.committer_work.notify_all()

    def drop_queue(self) -> int:
        """Fail every queued write (`reset`, or after a failure); returns how many."""
        count = len(self._queue)
        while self._queue:
            self._end(self._queue.popleft(), TaskState.FAILED)
        return count

    def forgive(self) -> None:
        """After a failure: every id given out so far counts as landed; none of them can be planned any more."""
        self.landed_upto = self._table.last_id

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end after `state.closing` was set. No lock held."""
        return self._thread.join(timeout_s)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._state.lock:
                self._state.committer_work.wait_for(self._has_work, None)
                task = None if self._paused or not self._queue else self._queue.popleft()
                if task is not None:
                    task.transition(TaskState.COPYING)
                    self._current = task
                elif not self._abandoned:
                    return
                abandoned = tuple(self._abandoned)
            if task is not None:
                self._try_to_land(task)
            if abandoned:
                self._free_abandoned(abandoned, wait_s=0.0 if task is not None else _ABANDONED_WAIT_S)

    def _has_work(self) -> bool:
        if self._queue and not self._paused:
            return True
        # Whoever still uses a page may yet abandon a copy into it.
        ending = self._state.closing and self._state.page_users == 0 and not self._queue
        return bool(self._abandoned) or ending

    def _try_to_land(self, task: WriteTask) -> None:
        try:
            self._land(task)
        except BaseException as cause:  # the thread must outlive any failure and hand it to every waiter
            with self._state.lock:
                self._end(task, TaskState.FAILED)
                self._current = None
                self.drop_queue()
                self._state.fail(cause)

    def _bind(self) -> None:
        if not self._bound:
            self._backend.bind_thread()
            self._bound = True

    def _free_abandoned(self, abandoned: tuple[tuple[StagingSlot, Event], ...], wait_s: float) -> None:
        """Free pages whose rows nobody wants any more, once the device has stopped writing into them."""
        for slot, copy_done in abandoned:
            try:
                if not copy_done.query() and not (wait_s and self._await_copy(copy_done, wait_s)):
                    continue
            except DeviceCopyError as error:
                logger.warning("a copy into staging slot %d that nobody waits for failed: %s", slot.index, error)
            with self._state.lock:
                self._abandoned.remove((slot, copy_done))
                self._staging.release(slot, TASK_HOLDER)
                self._state.progress.notify_all()

    def _await_copy(self, copy_done: Event, wait_s: float) -> bool:
        try:
            self._bind()
            copy_done.synchronize(wait_s)
        except DeviceCopyError:
            raise
        except Exception as error:  # whether the copy has ended cannot be told now, and the thread must go on
            logger.debug("a copy that nobody waits for is still running: %s", error)
            if not self._bound:
                self._runtime.sleep(wait_s)
            return False
        return True

    def _land(self, task: WriteTask) -> None:
        self._bind()
        if task.copy_done is not None:
            task.copy_done.synchronize(self._join_timeout_s)
        with self._state.lock:
            task.transition(TaskState.HOST_READY)
            self._state.progress.notify_all()
        self._runtime.checkpoint("committer.host_ready")
        if task.copy_slots:
            for part in task.copy_slots:
                spec = self._pool.spec(part.key)
                shape = (len(part.source_slots), spec.row_words)
                buffer = self._buffers.lease(shape, spec.word)
                rows = buffer.view(shape, spec.word)
                self._pool.gather(part.key, part.source_slots, rows)
                self._overwrite(task, (part.key,), part.destination_slots, {part.key: rows})
                self._buffers.give_back([buffer])
        else:
            order = self._last_rows(task.slots)
            slots = task.slots if order is None else task.slots[order]
            picked = None if order is None else torch.from_numpy(order)
            rows_by_key = {}
            for staged in task.staged:
                words = staged.rows.reshape(len(task.slots), -1).view(self._pool.spec(staged.key).word)
                rows_by_key[staged.key] = words if picked is None else words.index_select(0, picked)
            if len(slots) and rows_by_key:
                self._overwrite(task, tuple(rows_by_key), slots, rows_by_key)
        with self._state.lock:
            self.landed_upto = task.write_id
            self._end(task, TaskState.WRITTEN)
            self._current = None
            self._state.progress.notify_all()

    def _overwrite(
        self, task: WriteTask, keys: tuple[str, ...], slots: npt.NDArray[np.int64], rows: dict[str, torch.Tensor]
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
            self._table.stamp(keys, slots, task.write_id)
            if rescues:
                self._state.progress.notify_all()
        self._buffers.give_back(leftover_buffers)
        self._runtime.checkpoint("committer.write")
        for key in keys:
            self._pool.scatter(key, slots, rows[key])
            self.rows_written += len(slots)
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

    def _end(self, task: WriteTask, to: TaskState) -> None:
        if task.done:
            return
        task.transition(to)
        if task.staging_slot is None:
            return
        if to is TaskState.FAILED and task.copy_done is not None:
            self.abandon(task.staging_slot, task.copy_done)
        else:
            self._staging.release(task.staging_slot, TASK_HOLDER)
