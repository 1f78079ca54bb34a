# SPDX-License-Identifier: Apache-2.0
"""The committer thread of the storage world: takes tasks in order, sets old rows aside, puts new ones into the pool."""

from collections.abc import Iterator

from .explorer import Move
from .storage_device import Device
from .storage_rules import Change
from .storage_scenario import ABSENT
from .storage_state import Read, RecordPhase, Rescue, Rows, StorageState, Task, Work, put
from .storage_tables import Tables


class Committer:
    def __init__(self, tables: Tables, device: Device, *, may_fail: bool) -> None:
        self._tables = tables
        self._device = device
        self._scenario = tables.scenario
        self._changes = tables.changes
        self._may_fail = may_fail

    def moves(self, state: StorageState) -> Iterator[Move]:
        if state.failed:
            return
        work = state.work
        if work is None:
            if state.queue:
                yield from self._begin(state, state.queue[0])
            return
        if self._may_fail:
            yield Move(f"committer: {work.task} fails", self._fail, optional=True)
        yield from self._go_on(state, work)

    def _begin(self, state: StorageState, task: Task) -> Iterator[Move]:
        if task.records:
            if self._device.has_place(state, task.records[0]):
                yield Move(f"committer: takes {task}, begins the first transfer", self._take_records)
        elif not task.page_of or task.page_of not in state.page_copies:
            yield Move(f"committer: takes {task}, sets aside old rows", self._take_rows)

    def _go_on(self, state: StorageState, work: Work) -> Iterator[Move]:
        name = f"committer: {work.task}"
        match work.stage:
            case "following":
                if self._device.has_place(state, work.task.records[1]):
                    yield Move(f"{name}: begins the transfer of step {work.task.records[1]}", self._start_following)
            case "await":
                if all(step != work.task.records[0] for step, _ in state.transfers):
                    yield Move(f"{name}: step {work.task.records[0]}'s rows are on the host", self._end_transfer)
            case "set aside":
                yield Move(f"{name}: sets aside old rows", self._set_aside_record)
            case "publish":
                yield Move(f"{name}: publishes rows set aside, stamps", self._publish)
            case "write":
                yield Move(f"{name}: writes the first half", lambda changed: self._write(changed, first=True))
            case "land":
                yield Move(f"{name}: writes the second half, has landed", self._land)

    # -- a page or a block copy

    def _take_rows(self, state: StorageState) -> None:
        task, state.queue = state.queue[0], state.queue[1:]
        if task.copies:
            rows = tuple((target, state.pool[source]) for source, target in task.copies)
        else:
            content = state.pages[state.step_pages[task.page_of]].immediate
            rows = tuple((cell, (content, content)) for cell in task.cells)
            state.pages_ready_upto = task.page_of
        self._set_aside(state, Work(task, "publish", task.write_id), rows)

    # -- records: while one is put into the pool, the next is on its way

    def _take_records(self, state: StorageState) -> None:
        task, state.queue = state.queue[0], state.queue[1:]
        self._device.start_transfer(state, task.records[0])
        state.work = self._next_record(task)

    def _next_record(self, task: Task) -> Work | None:
        if not task.records:
            return None
        return Work(task, "following" if len(task.records) > 1 else "await", ABSENT)

    def _start_following(self, state: StorageState) -> None:
        work = _of(state)
        self._device.start_transfer(state, work.task.records[1])
        state.work = work._replace(stage="await")

    def _end_transfer(self, state: StorageState) -> None:
        work = _of(state)
        step = work.task.records[0]
        self._tables.set_record(state, step, state.records[step]._replace(phase=RecordPhase.HOST_READY))
        if self._changes.isdisjoint({Change.RING_FREED_EARLY, Change.RING_NEVER_RETURNED}):
            self._tables.give_back_ticket(state, step)
        state.work = work._replace(stage="set aside", write_id=state.records[step].write_id)

    def _set_aside_record(self, state: StorageState) -> None:
        work = _of(state)
        step = work.task.records[0]
        row = self._device.host_rows(state, step)
        cells = self._scenario.written_cells(step, deferred=True)
        self._set_aside(state, work, tuple((cell, row) for cell in cells))

    # -- putting rows into the pool

    def _set_aside(self, state: StorageState, work: Work, rows: Rows) -> None:
        """Under the lock choose and flag, then copy what is there. Only this thread writes the pool: one move."""
        rows = tuple((cell, row) for cell, row in rows if self._is_written(state, cell, work.write_id))
        if not rows:
            state.work = work
            self._end_write(state)
            return
        rescues = []
        overwritten = {cell for cell, _ in rows}
        for index, read in enumerate(state.reads):
            if not isinstance(read, Read):
                continue
            for number, cell in enumerate(self._scenario.reads[index].cells):
                entry = read.entries[number]
                if cell in overwritten and self._is_wanted(state, read, number, cell):
                    rescues.append((index, number, entry.write_id, state.pool[cell]))
                    read = read._replace(entries=put(read.entries, number, entry._replace(rescue=Rescue.FLAGGED)))
            state.reads = put(state.reads, index, read)
        state.work = work._replace(stage="publish", rows=rows, rescues=tuple(rescues))

    def _is_written(self, state: StorageState, cell: int, write_id: int) -> bool:
        if state.latest[cell] == write_id:
            return True
        if Change.SKIP_SUPERSEDED in self._changes:
            return False
        return Change.SKIP_UNWANTED not in self._changes or any(
            entry.write_id == write_id and entry.row is None
            for index, read in enumerate(state.reads)
            if isinstance(read, Read)
            for entry, of in zip(read.entries, self._scenario.reads[index].cells, strict=True)
            if of == cell
        )

    def _is_wanted(self, state: StorageState, read: Read, number: int, cell: int) -> bool:
        entry = read.entries[number]
        if Change.NO_RESCUE in self._changes or entry.row is not None or entry.rescue is not Rescue.NONE:
            return False
        return entry.write_id == state.stamps[cell] or Change.RESCUE_ANY_PIN in self._changes

    def _publish(self, state: StorageState) -> None:
        work = _of(state)
        for index, number, write_id, row in work.rescues:
            read = state.reads[index]
            if not isinstance(read, Read):
                continue
            entry = read.entries[number]
            if entry.write_id == write_id and entry.rescue is Rescue.FLAGGED:
                entry = entry._replace(rescue=Rescue.PUBLISHED, aside=row)
                state.reads = put(state.reads, index, read._replace(entries=put(read.entries, number, entry)))
        for cell, _ in work.rows:
            state.stamps = put(state.stamps, cell, work.write_id)
        state.work = work._replace(stage="write", rescues=())

    def _write(self, state: StorageState, *, first: bool) -> None:
        work = _of(state)
        for cell, row in work.rows:
            old = state.pool[cell]
            state.pool = put(state.pool, cell, (row[0], old[1]) if first else (old[0], row[1]))
        state.work = work._replace(stage="land")

    def _land(self, state: StorageState) -> None:
        self._write(state, first=False)
        self._end_write(state)

    def _end_write(self, state: StorageState) -> None:
        task = _of(state).task
        if not task.records:
            state.landed_upto = task.write_id
            if task.page_of:
                self._tables.release_page(state, state.step_pages[task.page_of], f"task {task.page_of}")
            state.work = None
            return
        step = task.records[0]
        state.record_landed_upto = state.records[step].write_id
        self._device.free_host(state, step)
        if Change.RING_RETURNED_TWICE in self._changes:
            self._tables.give_back_ticket(state, step)
        self._tables.set_record(state, step, state.records[step]._replace(phase=RecordPhase.WRITTEN, bounce=-1))
        left = task._replace(records=task.records[1:])
        state.work = self._next_record(left)
        if not left.records and Change.RECORDS_MOVE_PAGE_WATERMARK in self._changes:
            state.landed_upto = task.write_id

    # -- a failure

    def _fail(self, state: StorageState) -> None:
        """Every task ends; what a running copy uses is given back when that copy has ended."""
        work = _of(state)
        state.failed = True
        for task in (work.task, *state.queue):
            if task.page_of and task.page_of not in state.page_copies:
                self._tables.release_page(state, state.step_pages[task.page_of], f"task {task.page_of}")
            for step in task.records:
                self._device.give_up(state, step)
        state.work = None
        state.queue = ()


def _of(state: StorageState) -> Work:
    assert state.work is not None
    return state.work
