# SPDX-License-Identifier: Apache-2.0
"""The one thread that writes the pool: lands claims in claim order."""

from __future__ import annotations

from collections import deque

from omni_core.backend import Event
from omni_core.prefix_cache.abandoned_copies import AbandonedCopies
from omni_core.prefix_cache.deferred_copier import DeferredCopier
from omni_core.prefix_cache.pool_writer import PoolWriter
from omni_core.prefix_cache.slot_table import SlotTable
from omni_core.prefix_cache.staging import StagingBufferPool, StagingSlot
from omni_core.prefix_cache.state import CacheState
from omni_core.prefix_cache.task import TaskState, WriteTask
from omni_core.runtime import Runtime

TASK_HOLDER = "write"
"""The name under which a write task holds its staging slot."""
_ABANDONED_WAIT_S = 1.0
"""How long an idle committer waits at a time for a copy whose rows nobody wants."""
_PATIENCE_S = 0.005
"""How long a write nobody waits for lets the engine thread go first. Between the two calls of a step both want Python's
lock, and the engine has more to do there than announce and save: it prepares and launches the forward."""


class Committer:
    """Takes write tasks first in, first out. Everything but `join` needs the state lock held.

    Two watermarks say what has landed. Immediate writes and block copies are queued in the order of their ids; deferred
    records are queued when someone wants them, in the order of theirs. Of one key, a claim is never queued before an
    older one: whoever queues an immediate write to a deferred key first queues the records in front of it.
    """

    def __init__(
        self,
        state: CacheState,
        table: SlotTable,
        writer: PoolWriter,
        deferred: DeferredCopier,
        staging: StagingBufferPool,
        abandoned: AbandonedCopies,
        runtime: Runtime,
        join_timeout_s: float,
    ) -> None:
        self._state = state
        self._table = table
        self._writer = writer
        self._deferred = deferred
        self._staging = staging
        self._abandoned = abandoned
        self._runtime = runtime
        self._join_timeout_s = join_timeout_s
        self._queue: deque[WriteTask] = deque()
        self._current: WriteTask | None = None
        self._paused = False
        self._num_patient = 0
        """How many of the last writes in the queue nobody waits for; more than the queue has: all of them."""
        self.landed_upto = 0
        """Every immediate write and block copy with an id up to this has landed."""
        self._thread = runtime.spawn("omni-core-committer", self._run)

    @property
    def writing(self) -> bool:
        """A write is under way."""
        return self._current is not None

    @property
    def rows_rescued(self) -> int:
        """Rows set aside so far because a read still wanted them when they were overwritten."""
        return self._writer.rows_rescued

    @property
    def open_tasks(self) -> tuple[WriteTask, ...]:
        """Writes that have not ended, oldest first."""
        return (*((self._current,) if self._current else ()), *self._queue)

    def have_landed(self, write_id: int, record_id: int) -> bool:
        """Whether immediate writes up to `write_id` and deferred records up to `record_id` are in the pool."""
        return self.landed_upto >= write_id and self._deferred.landed_upto >= record_id

    def have_ended(self, write_id: int, record_id: int) -> bool:
        """The same, and the tasks that brought them have ended: nothing is held for them any more."""
        task = self._current
        ending = task is not None and bool(task.records) and task.records[0].write_id <= record_id
        return self.have_landed(write_id, record_id) and not ending

    def enqueue(self, task: WriteTask, *, patiently: bool = False) -> None:
        """Queue a claimed write. Immediate writes and block copies are queued in the order of their ids.

        Args:
            task: the write.
            patiently: whether nobody waits for it. It then begins with the next write that is not so, when somebody
                says `hurry`, or soon.
        """
        task.transition(TaskState.QUEUED)
        if task.staging_slot is not None:
            task.staging_slot.hold(TASK_HOLDER)
        self._num_patient = self._num_patient + 1 if patiently else 0
        self._queue.append(task)
        self._state.committer_work.notify_all()

    def hurry(self) -> None:
        """Somebody waits for what is queued: let it begin now."""
        if self._num_patient:
            self._num_patient = 0
            self._state.committer_work.notify_all()

    def abandon(self, slot: StagingSlot, copy_done: Event) -> None:
        """Nobody wants the rows of this copy any more: keep its page out of use until the copy has ended."""
        slot.hold(TASK_HOLDER)
        self._abandoned.add(f"staging slot {slot.index}", copy_done, lambda: self._staging.release(slot, TASK_HOLDER))

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
        self._num_patient = 0
        while self._queue:
            self._end(self._queue.popleft(), TaskState.FAILED)
        return count

    def forgive(self) -> None:
        """After a failure: every id given out so far counts as landed; none of them can be planned any more."""
        self.landed_upto = self._table.last_id
        self._deferred.landed_upto = self._table.last_id

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end after `state.closing` was set. No lock held."""
        return self._thread.join(timeout_s)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._state.lock:
                self._state.committer_work.wait_for(self._has_work, None)
                if self._num_patient and not self._is_wanted():
                    self._state.committer_work.wait_for(self._is_wanted, _PATIENCE_S)
                    self._num_patient = 0
                    continue
                task = None if self._paused or not self._queue else self._queue.popleft()
                if task is not None:
                    task.transition(TaskState.COPYING)
                    self._current = task
                elif not self._abandoned.places:
                    return
                any_abandoned = bool(self._abandoned.places)
            if task is not None:
                self._try_to_land(task)
            if any_abandoned:
                self._abandoned.free(wait_s=0.0 if task is not None else _ABANDONED_WAIT_S)

    def _has_work(self) -> bool:
        if self._queue and not self._paused:
            return True
        # Whoever still uses a page may yet abandon a copy into it.
        ending = self._state.closing and self._state.page_users == 0 and not self._queue
        return bool(self._abandoned.places) or ending

    def _is_wanted(self) -> bool:
        return len(self._queue) > self._num_patient or bool(self._abandoned.places) or self._state.closing

    def _try_to_land(self, task: WriteTask) -> None:
        try:
            self._land(task)
        except BaseException as cause:  # the thread must outlive any failure and hand it to every waiter
            with self._state.lock:
                self._end(task, TaskState.FAILED)
                self._current = None
                self.drop_queue()
                self._state.fail(cause)

    def _land(self, task: WriteTask) -> None:
        self._abandoned.bind_thread()
        if task.records:
            self._deferred.land(task)
        else:
            self._land_at_once(task)
        with self._state.lock:
            if not task.records:
                self.landed_upto = task.write_id
            self._end(task, TaskState.WRITTEN)
            self._current = None
            self._state.progress.notify_all()

    def _land_at_once(self, task: WriteTask) -> None:
        if task.copy_done is not None:
            task.copy_done.synchronize(self._join_timeout_s)
        with self._state.lock:
            task.transition(TaskState.HOST_READY)
            self._state.progress.notify_all()
        self._runtime.checkpoint("committer.host_ready")
        for part in task.copy_slots:
            self._writer.copy(task.write_id, part)
        if task.staged:
            self._writer.write(task.write_id, task.slots, task.staged)

    def _end(self, task: WriteTask, to: TaskState) -> None:
        if task.done:
            return
        task.transition(to)
        for record in task.records:
            self._deferred.give_up(record)
        if task.staging_slot is None:
            return
        if to is TaskState.FAILED and task.copy_done is not None:
            self.abandon(task.staging_slot, task.copy_done)
        else:
            self._staging.release(task.staging_slot, TASK_HOLDER)
