# SPDX-License-Identifier: Apache-2.0
"""What an engine does in one small run, and which rows a cache without any concurrency would then deliver.

Blocks hold one token, so a block is a slot. The row that step `k` computes has the content `k`, whatever its key;
`ABSENT` is no row. A *cell* is one key's row in one slot.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

ABSENT = 0
HIDDEN, OTHER, DEFERRED = "H", "M", "D"
"""Keys: hidden rows, a key of which a step brings rows or not, and a key whose rows may stay on the device."""


@dataclass(frozen=True)
class Fresh:
    """The slot enters a request's table outside its hit. An unannounced one is never heard of by the cache."""

    slot: int
    announced: bool = True
    digest: int = 0


@dataclass(frozen=True)
class Hit:
    """A request starts with these slots as its prefix hit."""

    slots: tuple[int, ...]
    digest: int = 0
    """The digest it expects at each; 0: it names none."""


@dataclass(frozen=True)
class Owed:
    """The step carries rows owed to a request that got these slots in step `held_since`: planned when it is saved."""

    slots: tuple[int, ...]
    held_since: int


@dataclass(frozen=True)
class Copy:
    """The engine copies a KV block before the forward."""

    source: int
    destination: int


@dataclass(frozen=True)
class Ended:
    """A request finished or was aborted."""

    request: str


@dataclass(frozen=True)
class NewWeights:
    """Before the step, the weights changed that the rows in these slots were computed with; who holds them stays."""

    slots: tuple[int, ...]


Event = Fresh | Hit | Owed | Copy | Ended | NewWeights
Kind = TypeVar("Kind", bound=Event)


@dataclass(frozen=True)
class Write:
    """The forward computes rows of `keys` in `slot`, for `request`."""

    slot: int
    keys: str
    request: str = "A"


@dataclass(frozen=True)
class Step:
    events: tuple[Event, ...] = ()
    writes: tuple[Write, ...] = ()
    saved: bool = True


@dataclass(frozen=True)
class PlannedRead:
    """One request's rows that a step reads back."""

    step: int
    event: Hit | Owed
    cells: tuple[int, ...]
    expected: tuple[int, ...]
    """The content of each cell."""


@dataclass(frozen=True)
class Scenario:
    """Steps of an engine, numbered from 1."""

    name: str
    num_slots: int
    keys: str
    steps: tuple[Step, ...]
    staging_depth: int = 2
    ring_units: int = 2
    """Room of the device ring."""
    record_units: int = 1
    """Room that one step's deferred rows take."""

    def cell(self, slot: int, key: str) -> int:
        return slot * len(self.keys) + self.keys.index(key)

    def cells_of(self, slots: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self.cell(slot, key) for slot in slots for key in self.keys)

    def cells_at(self, slot: int) -> tuple[int, ...]:
        return self.cells_of((slot,))

    def slot_of(self, cell: int) -> int:
        return cell // len(self.keys)

    def key_of(self, cell: int) -> str:
        return self.keys[cell % len(self.keys)]

    def is_deferred(self, cell: int) -> bool:
        return self.key_of(cell) == DEFERRED

    def cell_name(self, cell: int) -> str:
        return f"{self.key_of(cell)} of slot {self.slot_of(cell)}"

    def written_cells(self, number: int, *, deferred: bool) -> tuple[int, ...]:
        """The cells of step `number`'s forward whose key is, or is not, a deferred one."""
        return tuple(
            self.cell(write.slot, key)
            for write in self.steps[number - 1].writes
            for key in write.keys
            if (key == DEFERRED) is deferred
        )

    @cached_property
    def reads(self) -> tuple[PlannedRead, ...]:
        """Every read of the run, in the order of its steps, with the rows the sequential specification gives it."""
        contents = [ABSENT] * (self.num_slots * len(self.keys))
        tenancy_began = [0] * self.num_slots
        reads = []
        for number, step in enumerate(self.steps, 1):
            for new_weights in _events(step, NewWeights):
                for cell in self.cells_of(new_weights.slots):
                    contents[cell] = ABSENT
            for copy in _events(step, Copy):
                for source, destination in zip(
                    self.cells_at(copy.source), self.cells_at(copy.destination), strict=True
                ):
                    contents[destination] = contents[source]
                tenancy_began[copy.destination] = number
            for fresh in _events(step, Fresh):
                for cell in self.cells_at(fresh.slot):
                    contents[cell] = ABSENT
                tenancy_began[fresh.slot] = number
            if step.saved:
                for cell in (*self.written_cells(number, deferred=False), *self.written_cells(number, deferred=True)):
                    contents[cell] = number
            for event in step.events:
                if isinstance(event, Hit | Owed):
                    cells = self.cells_of(event.slots)
                    since = event.held_since if isinstance(event, Owed) else number
                    expected = tuple(
                        contents[cell] if tenancy_began[self.slot_of(cell)] <= since else ABSENT for cell in cells
                    )
                    reads.append(PlannedRead(number, event, cells, expected))
        return tuple(reads)

    def reads_of(self, number: int, kind: type[Hit | Owed] | None = None) -> tuple[int, ...]:
        """Indices of step `number`'s reads, of one kind or of both."""
        return tuple(
            index
            for index, read in enumerate(self.reads)
            if read.step == number and (kind is None or isinstance(read.event, kind))
        )

    def deferred_requests(self, number: int) -> frozenset[str]:
        """Requests with deferred rows in step `number`."""
        return frozenset(write.request for write in self.steps[number - 1].writes if DEFERRED in write.keys)


def step_of(*parts: Event | Write, saved: bool = True) -> Step:
    """A step of these events and writes."""
    events = tuple(part for part in parts if not isinstance(part, Write))
    return Step(events, tuple(part for part in parts if isinstance(part, Write)), saved)


def _events(step: Step, kind: type[Kind]) -> tuple[Kind, ...]:
    return tuple(event for event in step.events if isinstance(event, kind))
