# SPDX-License-Identifier: Apache-2.0
"""Device copies of the storage world: pages and records on their way to the host, in the order they were begun."""

from collections.abc import Iterator

from .explorer import Move, Violation
from .storage_rules import Change
from .storage_state import Bounce, Halves, RecordPhase, StorageState, put
from .storage_tables import Tables


class Device:
    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._scenario = tables.scenario
        self._changes = tables.changes

    def moves(self, state: StorageState) -> Iterator[Move]:
        if state.page_copies:
            yield Move(f"device: page copy of step {state.page_copies[0]} is complete", self._complete_page_copy)
        if state.transfers:
            step, half = state.transfers[0]
            what = "is half done" if half == 0 else "is complete"
            yield Move(f"device: transfer of step {step}'s record {what}", self._move_record)

    def _complete_page_copy(self, state: StorageState) -> None:
        step, state.page_copies = state.page_copies[0], state.page_copies[1:]
        index = state.step_pages[step]
        page = state.pages[index]._replace(immediate=step)
        # A page is carved anew for each step: where this step has immediate rows, another had its deferred ones.
        if self._has_guests(state, index, besides=step):
            page = page._replace(deferred=(step, step))
        state.pages = put(state.pages, index, page)
        if state.failed:
            self._tables.release_page(state, index, f"task {step}")

    def _has_guests(self, state: StorageState, page: int, besides: int) -> bool:
        """Whether other steps' records are on their way through a page, whether they hold it or not."""
        under_way = (RecordPhase.COPYING, RecordPhase.HOST_READY)
        return any(
            step != besides and record.phase in under_way and record.page == page and record.bounce < 0
            for step, record in enumerate(state.records)
        )

    # -- records

    def _goes_into_page(self, state: StorageState, step: int) -> bool:
        return f"step {step}" in state.pages[state.records[step].page].holders

    def has_place(self, state: StorageState, step: int) -> bool:
        """Whether there is somewhere on the host to copy the record to."""
        return self._goes_into_page(state, step) or not all(bounce.busy for bounce in state.bounces)

    def start_transfer(self, state: StorageState, step: int) -> None:
        """Into the step's page while the step is open, else into a bounce buffer."""
        record = state.records[step]
        if record.phase not in (RecordPhase.OPEN, RecordPhase.QUEUED):
            raise Violation("g", f"the deferred rows of step {step} cross to the host twice")
        record = record._replace(phase=RecordPhase.COPYING)
        if self._goes_into_page(state, step):
            self._tables.hold_page(state, record.page, f"record {step}")
        else:
            bounce = next(index for index, bounce in enumerate(state.bounces) if not bounce.busy)
            if Change.ONE_BOUNCE in self._changes:
                bounce = 0
            state.bounces = put(state.bounces, bounce, state.bounces[bounce]._replace(busy=True))
            record = record._replace(bounce=bounce)
        self._tables.set_record(state, step, record)
        state.transfers = (*state.transfers, (step, 0))
        if Change.RING_FREED_EARLY in self._changes:
            self._tables.give_back_ticket(state, step)

    def _move_record(self, state: StorageState) -> None:
        """Move one half of the oldest record under way from the device ring to the host."""
        (step, half), *others = state.transfers
        record = state.records[step]
        start = state.ring_starts[step]
        content = state.arena[start if half == 0 else start + self._scenario.record_units - 1]
        if record.bounce < 0:
            page = state.pages[record.page]
            state.pages = put(state.pages, record.page, page._replace(deferred=put(page.deferred, half, content)))
        else:
            bounce = state.bounces[record.bounce]
            bounce = bounce._replace(deferred=put(bounce.deferred, half, content))
            state.bounces = put(state.bounces, record.bounce, bounce)
        state.transfers = (*([(step, 1)] if half == 0 else []), *others)
        if half == 1 and state.failed:
            self._give_up_all(state, step)

    def host_rows(self, state: StorageState, step: int) -> Halves:
        """What lies where the record was copied to."""
        record = state.records[step]
        place = state.pages[record.page] if record.bounce < 0 else state.bounces[record.bounce]
        return place.deferred

    def free_host(self, state: StorageState, step: int) -> None:
        """The record's rows are no longer needed on the host."""
        record = state.records[step]
        if record.bounce < 0:
            self._tables.release_page(state, record.page, f"record {step}")
        else:
            state.bounces = put(state.bounces, record.bounce, Bounce())

    def give_up(self, state: StorageState, step: int) -> None:
        """The record will not land. A transfer under way gives its places back when it is complete."""
        if any(moving == step for moving, _ in state.transfers):
            return
        phase = state.records[step].phase
        if phase is RecordPhase.HOST_READY:
            self.free_host(state, step)
        elif phase is RecordPhase.COPYING:
            self._give_up_all(state, step)
            return
        else:
            self._tables.give_back_ticket(state, step)
        self._tables.set_record(state, step, state.records[step]._replace(phase=RecordPhase.FAILED))

    def _give_up_all(self, state: StorageState, step: int) -> None:
        self._tables.give_back_ticket(state, step)
        self.free_host(state, step)
        self._tables.set_record(state, step, state.records[step]._replace(phase=RecordPhase.FAILED))
