# SPDX-License-Identifier: Apache-2.0
"""The storage world: where rows lie, and every thread that moves, reads or frees them."""

from collections.abc import Iterable, Iterator

from .explorer import Move, Violation
from .storage_committer import Committer
from .storage_device import Device
from .storage_engine import Engine
from .storage_readers import Consumer, Prefetcher
from .storage_rules import Change
from .storage_scenario import Scenario
from .storage_state import Read, RecordPhase, StepPhase, StorageState
from .storage_tables import Tables


class StorageWorld:
    """Properties: (a) right row, (b) no needless failure, (c) absent means absent, (d) no deadlock, (e) nothing is held
    at the end, (f) device bytes are charged and returned once, (g) bytes cross once.
    """

    def __init__(self, scenario: Scenario, changes: Iterable[Change] = (), *, may_fail: bool = False) -> None:
        self._scenario = scenario
        tables = Tables(scenario, frozenset(changes))
        device = Device(tables)
        self._actors = (
            Engine(tables, device),
            device,
            Committer(tables, device, may_fail=may_fail),
            Prefetcher(tables),
            Consumer(tables),
        )

    def initial(self) -> StorageState:
        return StorageState(self._scenario)

    def moves(self, state: StorageState) -> Iterator[Move]:
        for actor in self._actors:
            yield from actor.moves(state)

    def check_at_rest(self, state: StorageState) -> None:
        stuck = [
            name
            for name, waits in (
                ("engine", not state.closed),
                ("committer", not state.failed and (state.work is not None or bool(state.queue))),
                ("reader", not state.failed and (state.gather is not None or bool(state.gathers))),
                ("builder", bool(state.builder) or StepPhase.OPEN in state.steps),
            )
            if waits
        ]
        if stuck:
            raise Violation("d", f"nobody can go on: {', '.join(stuck)}")
        held = [f"read {index}" for index, read in enumerate(state.reads) if isinstance(read, Read)]
        if state.sides_lost:
            held.append(f"{state.sides_lost} side buffer(s)")
        held += [f"page {index} by {set(page.holders)}" for index, page in enumerate(state.pages) if page.holders]
        held += [f"bounce buffer {index}" for index, bounce in enumerate(state.bounces) if bounce.busy]
        held += [f"device bytes of step {ticket.step}" for ticket in state.tickets]
        left = (RecordPhase.NONE, RecordPhase.WRITTEN, RecordPhase.FAILED)
        held += [f"record of step {step}" for step, record in enumerate(state.records) if record.phase not in left]
        if held:
            raise Violation("e", f"never given back: {', '.join(held)}")
