# SPDX-License-Identifier: Apache-2.0
"""What the threads of the storage world do to the tables, each with the state lock held."""

from .explorer import Violation
from .storage_rules import Change
from .storage_scenario import ABSENT, HIDDEN, Scenario
from .storage_state import (
    ENDED,
    NOTHING,
    Batch,
    Entry,
    Read,
    Record,
    RecordPhase,
    Rescue,
    StepPhase,
    StorageState,
    Task,
    Ticket,
    put,
)


class Tables:
    """Every method changes the state it is given."""

    def __init__(self, scenario: Scenario, changes: frozenset[Change]) -> None:
        self.scenario = scenario
        self.changes = changes

    # -- tenancies, claims, presence

    def present_id(self, state: StorageState, cell: int) -> int:
        latest, slot = state.latest[cell], self.scenario.slot_of(cell)
        return latest if latest > max(state.floors[slot], state.version_floors[slot]) else ABSENT

    def start_tenancy(self, state: StorageState, slot: int, digest: int = 0) -> None:
        state.last_id += 1
        state.floors = put(state.floors, slot, state.last_id)
        state.digests = put(state.digests, slot, digest)

    def new_weights(self, state: StorageState, slots: tuple[int, ...]) -> None:
        """Rows stored until now are absent for later plans; the slots change no hands."""
        for slot in slots if Change.NEW_WEIGHTS_IGNORED not in self.changes else ():
            if Change.NEW_WEIGHTS_ARE_TENANCIES in self.changes:
                self.start_tenancy(state, slot, state.digests[slot])
            state.version_floors = put(state.version_floors, slot, state.last_id)

    def claim(self, state: StorageState, cells: tuple[int, ...], write_id: int) -> None:
        for cell in cells:
            state.latest = put(state.latest, cell, write_id)

    # -- reads

    def plan(self, state: StorageState, index: int, digest: int = 0, held_since_id: int | None = None) -> None:
        """Plan a read as its rows are now."""
        entries = []
        for cell in self.scenario.reads[index].cells:
            slot = self.scenario.slot_of(cell)
            write_id = self.present_id(state, cell)
            foreign = digest and state.digests[slot] and digest != state.digests[slot]
            if foreign and Change.DIGEST_IGNORED not in self.changes:
                write_id = ABSENT
            lost = held_since_id is not None and state.floors[slot] > held_since_id
            if lost and Change.LATE_PLAN_IGNORES_TENANCY not in self.changes:
                write_id = ABSENT
            entries.append(Entry(write_id, None if write_id else NOTHING))
        state.reads = put(state.reads, index, Read(tuple(entries)))
        self._gather(state, index, range(len(entries)))

    def plan_again(self, state: StorageState, index: int, written_slots: frozenset[int]) -> None:
        """The read's own step has claimed these slots: entries there want the new rows."""
        read = state.reads[index]
        if not isinstance(read, Read):
            return
        moved = []
        for number, cell in enumerate(self.scenario.reads[index].cells):
            write_id = self.present_id(state, cell)
            if self.scenario.slot_of(cell) in written_slots and write_id != read.entries[number].write_id:
                entry = Entry(write_id, None if write_id else NOTHING)
                read = read._replace(entries=put(read.entries, number, entry))
                moved.append(number)
        state.reads = put(state.reads, index, read)
        self._gather(state, index, moved)

    def _gather(self, state: StorageState, index: int, numbers: range | list[int]) -> None:
        read = state.reads[index]
        assert isinstance(read, Read)
        cells = self.scenario.reads[index].cells
        parts = tuple((number, read.entries[number].write_id) for number in numbers if read.entries[number].write_id)
        if not parts:
            return
        newest = max(write_id for _, write_id in parts)
        deferred = [write_id for number, write_id in parts if self.scenario.is_deferred(cells[number])]
        newest_record = max(deferred, default=0)
        if newest_record:
            if Change.HIT_DOES_NOT_FORCE not in self.changes:
                self.force_through(state, newest_record)
                newest_record = min(newest_record, state.forced_upto)
            if Change.ONE_WATERMARK in self.changes:
                newest_record = 0
        state.gathers = (*state.gathers, Batch(index, parts, newest, newest_record))

    def end_read(self, state: StorageState, index: int) -> None:
        """Give back its pins and side buffers; what the prefetch thread still has of it is void."""
        read = state.reads[index]
        if not isinstance(read, Read):
            return
        if Change.SIDE_BUFFER_DROPPED in self.changes:
            state.sides_lost += sum(entry.rescue is Rescue.FLAGGED for entry in read.entries)
        state.reads = put(state.reads, index, ENDED)
        state.gathers = tuple(batch for batch in state.gathers if batch.read != index)
        if state.gather is not None and state.gather.batch.read == index:
            state.gather = None

    def hidden_absent(self, state: StorageState, index: int) -> bool:
        """Whether the read's request has to fail."""
        read = state.reads[index]
        assert isinstance(read, Read)
        cells = self.scenario.reads[index].cells
        return any(
            entry.write_id == ABSENT and self.scenario.key_of(cell) == HIDDEN
            for entry, cell in zip(read.entries, cells, strict=True)
        )

    # -- staging pages

    def hold_page(self, state: StorageState, index: int, holder: str) -> None:
        page = state.pages[index]
        state.pages = put(state.pages, index, page._replace(holders=page.holders | {holder}))

    def release_page(self, state: StorageState, index: int, holder: str) -> None:
        page = state.pages[index]
        state.pages = put(state.pages, index, page._replace(holders=page.holders - {holder}))

    def end_step(self, state: StorageState, step: int) -> None:
        """The step is consumed: its reads end, its hold on the page too."""
        state.steps = put(state.steps, step, StepPhase.CONSUMED)
        for index in self.scenario.reads_of(step):
            self.end_read(state, index)
        page = state.step_pages[step]
        self.release_page(state, page, f"step {step}")
        if Change.STAGING_FREED_WITH_STEP in self.changes:
            self.release_page(state, page, f"task {step}")
        if Change.RECORD_DOES_NOT_HOLD_PAGE in self.changes:
            self.release_page(state, page, f"record {step}")

    # -- deferred records

    def charge(self, state: StorageState, step: int) -> bool:
        """Take room in the device ring for the step's record and clone its rows there; false if there is none."""
        units = self.scenario.record_units
        start = _place(state.tickets, state.ring_end, units, self.scenario.ring_units)
        if start is None:
            return False
        for ticket in state.tickets:
            if not ticket.returned and ticket.start < start + units and start < ticket.start + ticket.units:
                raise Violation("f", f"the rows of step {step} are cloned over those of step {ticket.step}")
        state.tickets = (*state.tickets, Ticket(step, start, units))
        state.ring_end = start + units
        state.ring_starts = put(state.ring_starts, step, start)
        for unit in range(start, start + units):
            state.arena = put(state.arena, unit, step)
        return True

    def give_back_ticket(self, state: StorageState, step: int) -> None:
        """The record's device bytes may be overwritten."""
        tickets = state.tickets
        index = next((index for index, ticket in enumerate(tickets) if ticket.step == step), None)
        if index is None or tickets[index].returned:
            raise Violation("f", f"device bytes of step {step}'s record are given back twice")
        tickets = put(tickets, index, tickets[index]._replace(returned=True))
        while tickets and tickets[0].returned:
            tickets = tickets[1:]
        state.tickets = tickets

    def set_record(self, state: StorageState, step: int, record: Record) -> None:
        state.records = put(state.records, step, record)

    def open_records(self, state: StorageState) -> list[int]:
        """Steps whose records nothing has asked for yet, oldest first."""
        return [step for step, record in enumerate(state.records) if record.phase is RecordPhase.OPEN]

    def force(self, state: StorageState, steps: list[int]) -> None:
        """Queue these records, in one task."""
        if not steps:
            return
        if Change.FORCED_RECORD_STAYS_OPEN not in self.changes:
            for step in steps:
                self.set_record(state, step, state.records[step]._replace(phase=RecordPhase.QUEUED))
        state.forced_upto = max(state.forced_upto, state.records[steps[-1]].write_id)
        state.queue = (*state.queue, Task(state.forced_upto, records=tuple(steps)))

    def force_through(self, state: StorageState, write_id: int) -> None:
        """Queue every record with an id up to this."""
        self.force(state, [step for step in self.open_records(state) if state.records[step].write_id <= write_id])

    def force_all(self, state: StorageState) -> None:
        self.force(state, self.open_records(state))


def _place(tickets: tuple[Ticket, ...], end: int, units: int, capacity: int) -> int | None:
    """First free unit of a ring that is handed out front to back and given back oldest first."""
    if not tickets:
        return 0 if units <= capacity else None
    oldest = tickets[0].start
    if end <= oldest:
        return end if units <= oldest - end else None
    if units <= capacity - end:
        return end
    return 0 if units <= oldest else None
