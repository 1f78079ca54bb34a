# SPDX-License-Identifier: Apache-2.0
"""The engine thread of the storage world: `new_step_starts`, `save_outputs` in two lock sections, then `flush`."""

from collections.abc import Iterator

from .explorer import Move
from .storage_device import Device
from .storage_rules import Change
from .storage_scenario import DEFERRED, Copy, Ended, Event, Fresh, Hit, NewWeights, Owed
from .storage_state import RecordPhase, StepPhase, StorageState, Task, put
from .storage_tables import Tables


class Engine:
    def __init__(self, tables: Tables, device: Device) -> None:
        self._tables = tables
        self._device = device
        self._scenario = tables.scenario
        self._changes = tables.changes

    def moves(self, state: StorageState) -> Iterator[Move]:
        step = state.step
        if state.closed:
            return
        if state.failed:
            yield Move(f"engine: the next call (step {step}) raises the failure", self._raise)
        elif step > len(self._scenario.steps):
            if StepPhase.OPEN not in state.steps and not state.builder:
                yield Move("engine: flush", self._flush)
        elif state.phase == "announce":
            yield Move(f"engine: new_step_starts({step})", self._announce)
        elif state.phase == "stage":
            if any(not page.holders for page in state.pages):
                yield Move(f"engine: save_outputs({step}) {self._save_name()}", self._stage)
        else:
            yield Move(f"engine: save_outputs({step}) claims its writes", self._claim)
        open_records = self._tables.open_records(state)
        if open_records and not state.failed:
            yield Move(
                f"engine: pressure sends the record of step {open_records[0]}",
                lambda changed: self._tables.force(changed, open_records[:1]),
                optional=True,
            )

    def _save_name(self) -> str:
        return "takes a page and claims its writes" if self._one_section else "takes a page and clones its rows"

    @property
    def _one_section(self) -> bool:
        return Change.STAGE_WITH_CLAIM in self._changes or DEFERRED not in self._scenario.keys

    # -- new_step_starts

    def _announce(self, state: StorageState) -> None:
        number = state.step
        step = self._scenario.steps[number - 1]
        self._end_unsaved_reads(state)
        for event in step.events:
            if isinstance(event, NewWeights):
                self._tables.new_weights(state, event.slots)
        for event in step.events:
            if isinstance(event, Ended):
                self._end_request(state, event.request)
        first, second = Copy, Fresh
        if Change.COPY_AFTER_TENANCIES in self._changes:
            first, second = Fresh, Copy
        if Change.PLAN_BEFORE_TENANCIES in self._changes:
            self._plan_hits(state)
        for kind in (first, second):
            for event in step.events:
                if isinstance(event, kind):
                    self._change_tenancy(state, event)
        if Change.PLAN_BEFORE_TENANCIES not in self._changes:
            self._plan_hits(state)
        state.ids_after_start = put(state.ids_after_start, number, state.last_id)
        if step.saved:
            state.phase = "stage"
        else:
            state.step += 1

    def _end_unsaved_reads(self, state: StorageState) -> None:
        if Change.UNSAVED_STEP_KEEPS_READS in self._changes:
            return
        for number in range(1, state.step):
            if state.steps[number] is StepPhase.NOT_SAVED:
                for index in self._scenario.reads_of(number, Hit):
                    self._tables.end_read(state, index)

    def _end_request(self, state: StorageState, request: str) -> None:
        """Its deferred rows leave the device, and with them all older ones."""
        open_records = self._tables.open_records(state)
        own = [step for step in open_records if request in self._scenario.deferred_requests(step)]
        if Change.OWN_RECORDS_FIRST not in self._changes:
            own = [step for step in open_records if own and step <= own[-1]]
        self._tables.force(state, own)

    def _change_tenancy(self, state: StorageState, event: Event) -> None:
        if isinstance(event, Copy):
            self._copy_block(state, event)
        elif isinstance(event, Fresh) and event.announced:
            self._tables.start_tenancy(state, event.slot, event.digest)

    def _plan_hits(self, state: StorageState) -> None:
        for index in self._scenario.reads_of(state.step, Hit):
            self._tables.plan(state, index, digest=self._scenario.reads[index].event.digest)

    def _copy_block(self, state: StorageState, copy: Copy) -> None:
        tables, scenario = self._tables, self._scenario
        pairs = zip(scenario.cells_at(copy.source), scenario.cells_at(copy.destination), strict=True)
        present = tuple((source, target) for source, target in pairs if tables.present_id(state, source))
        if Change.COPY_FORCES_ALL in self._changes:
            tables.force_all(state)
        elif Change.COPY_IGNORES_RECORDS not in self._changes:
            last = 0 if Change.COPY_FORCES_SOURCE_ONLY in self._changes else 1
            claims = [
                state.latest[cell] for pair in present if scenario.is_deferred(pair[0]) for cell in pair[: last + 1]
            ]
            tables.force_through(state, max(claims, default=0))
        tables.start_tenancy(state, copy.destination)
        state.last_id += 1
        targets = tuple(target for _, target in present)
        tables.claim(state, targets, state.last_id)
        if present:
            state.queue = (*state.queue, Task(state.last_id, copies=present, cells=targets))

    # -- save_outputs

    def _stage(self, state: StorageState) -> None:
        """Take a page; take room on the device for the deferred rows and clone them there, if there is room."""
        number = state.step
        page = next(index for index, page in enumerate(state.pages) if not page.holders)
        self._tables.hold_page(state, page, "save")
        deferred = bool(self._scenario.written_cells(number, deferred=True)) and self._tables.charge(state, number)
        state.saving = (page, deferred)
        if self._one_section:
            self._claim(state)
        else:
            state.phase = "claim"

    def _claim(self, state: StorageState) -> None:
        tables, scenario, number = self._tables, self._scenario, state.step
        assert state.saving is not None
        page, deferred = state.saving
        state.last_id += 1
        write_id = state.last_id
        at_once = scenario.written_cells(number, deferred=False)
        later = scenario.written_cells(number, deferred=True)
        falls_back = bool(later) and not deferred
        if falls_back:
            at_once += later
        tables.claim(state, at_once, write_id)
        task = Task(write_id, page_of=number, cells=at_once)
        if falls_back:
            if Change.FORCE_AFTER_FALLBACK in self._changes:
                state.queue = (*state.queue, task)
            if Change.FALLBACK_DOES_NOT_FORCE not in self._changes:
                tables.force_all(state)
        elif later:
            tables.claim(state, later, write_id)
            record = state.records[number]._replace(phase=RecordPhase.OPEN, write_id=write_id, page=page)
            tables.set_record(state, number, record)
        self._plan_at_save(state)
        if task not in state.queue:
            state.queue = (*state.queue, task)
        tables.hold_page(state, page, f"step {number}")
        tables.hold_page(state, page, f"task {number}")
        tables.release_page(state, page, "save")
        state.page_copies = (*state.page_copies, number)
        state.step_pages = put(state.step_pages, number, page)
        state.steps = put(state.steps, number, StepPhase.OPEN)
        state.saving = None
        state.step += 1
        state.phase = "announce"

    def _plan_at_save(self, state: StorageState) -> None:
        number = state.step
        if Change.PLAN_ONLY_AT_START not in self._changes:
            written = frozenset(write.slot for write in self._scenario.steps[number - 1].writes)
            for index in self._scenario.reads_of(number, Hit):
                self._tables.plan_again(state, index, written)
        for index in self._scenario.reads_of(number, Owed):
            event = self._scenario.reads[index].event
            assert isinstance(event, Owed)
            self._tables.plan(state, index, held_since_id=state.ids_after_start[event.held_since])

    # -- the end

    def _flush(self, state: StorageState) -> None:
        self._end_unsaved_reads(state)
        self._tables.force_all(state)
        state.closed = True

    def _raise(self, state: StorageState) -> None:
        """A call after a failure: it ends what the step under way holds, and the engine calls no more."""
        for number in range(1, len(state.steps)):
            if state.steps[number] is StepPhase.NOT_SAVED:
                for index in self._scenario.reads_of(number):
                    self._tables.end_read(state, index)
        if state.saving is not None:
            page, deferred = state.saving
            self._tables.release_page(state, page, "save")
            if deferred:
                self._tables.give_back_ticket(state, state.step)
        state.saving = None
        for step in self._tables.open_records(state):
            self._device.give_up(state, step)
        state.closed = True
