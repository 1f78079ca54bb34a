# SPDX-License-Identifier: Apache-2.0
"""The prefetch thread and the consumer of the storage world; delivered rows are compared with the specification."""

from collections.abc import Iterator

from .explorer import Move, Violation
from .storage_rules import Change
from .storage_scenario import ABSENT, HIDDEN
from .storage_state import Batch, Gather, Read, RecordPhase, Rescue, StepPhase, StorageState, put
from .storage_tables import Tables


class Prefetcher:
    """Gathers batches first in, first out."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._reads = tables.scenario.reads
        self._changes = tables.changes

    def moves(self, state: StorageState) -> Iterator[Move]:
        gather = state.gather
        if state.failed:
            return
        if gather is None:
            if state.gathers and self._has_landed(state, state.gathers[0]):
                yield Move(f"reader: gathers the first half of {self._name(state.gathers[0])}", self._gather_first)
        elif gather.second is None:
            yield Move(f"reader: gathers the second half of {self._name(gather.batch)}", self._gather_second)
        elif not self._rescue_pending(state, gather):
            yield Move(f"reader: settles {self._name(gather.batch)}", self._settle)

    def _name(self, batch: Batch) -> str:
        cells = self._reads[batch.read].cells
        rows = ", ".join(f"{self._tables.scenario.cell_name(cells[number])}" for number, _ in batch.parts)
        return f"{rows} for step {self._reads[batch.read].step}"

    def _has_landed(self, state: StorageState, batch: Batch) -> bool:
        if Change.NO_LANDING_WAIT in self._changes:
            return True
        return state.landed_upto >= batch.newest_id and state.record_landed_upto >= batch.newest_record_id

    def _gather_first(self, state: StorageState) -> None:
        batch = state.gathers[0]
        state.gathers = state.gathers[1:]
        cells = self._reads[batch.read].cells
        state.gather = Gather(batch, tuple(state.pool[cells[number]][0] for number, _ in batch.parts))

    def _gather_second(self, state: StorageState) -> None:
        gather = state.gather
        assert gather is not None
        cells = self._reads[gather.batch.read].cells
        state.gather = gather._replace(second=tuple(state.pool[cells[number]][1] for number, _ in gather.batch.parts))

    def _still_planned(self, state: StorageState, gather: Gather) -> Iterator[tuple[int, int]]:
        """(place in the batch, entry) of what still wants the write it was gathered for."""
        read = state.reads[gather.batch.read]
        assert isinstance(read, Read)
        for place, (number, write_id) in enumerate(gather.batch.parts):
            entry = read.entries[number]
            if entry.row is None and (entry.write_id == write_id or Change.OLD_GATHER_FILLS_NEW_ENTRY in self._changes):
                yield place, number

    def _rescue_pending(self, state: StorageState, gather: Gather) -> bool:
        read = state.reads[gather.batch.read]
        assert isinstance(read, Read)
        return any(read.entries[number].rescue is Rescue.FLAGGED for _, number in self._still_planned(state, gather))

    def _settle(self, state: StorageState) -> None:
        gather = state.gather
        assert gather is not None
        assert gather.second is not None
        batch = gather.batch
        for place, number in self._still_planned(state, gather):
            read = state.reads[batch.read]
            assert isinstance(read, Read)
            entry = read.entries[number]
            cell = self._reads[batch.read].cells[number]
            row = (gather.first[place], gather.second[place])
            if entry.rescue is Rescue.PUBLISHED:
                row = entry.aside
            elif state.stamps[cell] != entry.write_id and Change.OLD_GATHER_FILLS_NEW_ENTRY not in self._changes:
                raise Violation(
                    "b",
                    f"{self._tables.scenario.cell_name(cell)} for step {self._reads[batch.read].step}: write "
                    f"{entry.write_id} is wanted, write {state.stamps[cell]} lies there and nothing was set aside",
                )
            entry = entry._replace(row=row)
            state.reads = put(state.reads, batch.read, read._replace(entries=put(read.entries, number, entry)))
        state.gather = None


class Consumer:
    """One builder: consumes open steps in any order, and blocks inside `materialize`."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._scenario = tables.scenario
        self._changes = tables.changes

    def moves(self, state: StorageState) -> Iterator[Move]:
        if state.builder:
            if state.failed:
                yield Move(f"builder: materialize({state.builder}) raises the failure", self._give_up)
            elif self._is_ready(state, state.builder):
                yield Move(f"builder: materialize({state.builder}) returns", self._deliver)
            return
        for step, phase in enumerate(state.steps):
            if phase is StepPhase.OPEN:
                yield Move(
                    f"builder: enters materialize({step})", lambda changed, step=step: self._enter(changed, step)
                )
                yield Move(
                    f"builder: discard_step({step})", lambda changed, step=step: self._tables.end_step(changed, step)
                )

    def _enter(self, state: StorageState, step: int) -> None:
        state.builder = step
        state.steps = put(state.steps, step, StepPhase.BEING_MATERIALIZED)
        record = state.records[step]
        if Change.MATERIALIZE_DOES_NOT_FORCE in self._changes or state.failed:
            return
        if record.phase is not RecordPhase.NONE:
            self._tables.force_through(state, record.write_id)

    def _is_ready(self, state: StorageState, step: int) -> bool:
        record = state.records[step].phase
        if state.pages_ready_upto < step or RecordPhase.NONE < record < RecordPhase.HOST_READY:
            return False
        reads = (state.reads[index] for index in self._scenario.reads_of(step))
        return all(isinstance(read, Read) and all(entry.row is not None for entry in read.entries) for read in reads)

    def _give_up(self, state: StorageState) -> None:
        self._tables.end_step(state, state.builder)
        state.builder = 0

    def _deliver(self, state: StorageState) -> None:
        step = state.builder
        page = state.pages[state.step_pages[step]]
        if self._scenario.written_cells(step, deferred=False) and page.immediate != step:
            raise Violation("a", f"materialize({step}) delivers rows of step {page.immediate} as its own")
        if state.records[step].phase is not RecordPhase.NONE and page.deferred != (step, step):
            raise Violation("a", f"materialize({step}) delivers {page.deferred} as its own deferred rows")
        for index in self._scenario.reads_of(step):
            self._check_read(state, index)
        self._tables.end_step(state, step)
        state.builder = 0

    def _check_read(self, state: StorageState, index: int) -> None:
        planned = self._scenario.reads[index]
        read = state.reads[index]
        assert isinstance(read, Read)
        what = f"{type(planned.event).__name__} of slots {planned.event.slots} in step {planned.step}"
        must_fail = any(
            row == ABSENT and self._scenario.key_of(cell) == HIDDEN
            for cell, row in zip(planned.cells, planned.expected, strict=True)
        )
        fails = self._tables.hidden_absent(state, index)
        if fails and not must_fail:
            raise Violation("b", f"{what}: fails although its hidden rows were computed")
        if fails:
            return
        for cell, entry, expected in zip(planned.cells, read.entries, planned.expected, strict=True):
            if entry.row != (expected, expected):
                kind = "c" if expected == ABSENT and self._scenario.key_of(cell) != HIDDEN else "a"
                raise Violation(
                    kind,
                    f"{what}: {self._scenario.cell_name(cell)} is delivered as {entry.row}, right is "
                    f"{(expected, expected) if expected else 'absent'}",
                )
