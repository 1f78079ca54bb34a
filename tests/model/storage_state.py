# SPDX-License-Identifier: Apache-2.0
"""One state of the storage world: tables, pool, staging pages, device ring, and what each thread is about to do."""

from enum import IntEnum
from operator import attrgetter
from typing import NamedTuple, TypeVar

from .storage_scenario import ABSENT, Scenario

Value = TypeVar("Value")
Halves = tuple[int, int]
"""A row, written and read in two parts."""
Rows = tuple[tuple[int, Halves], ...]
"""(cell, row)"""
NOTHING: Halves = (ABSENT, ABSENT)
ENDED = "ended"


class StepPhase(IntEnum):
    NOT_SAVED = 0
    OPEN = 1
    BEING_MATERIALIZED = 2
    CONSUMED = 3


class RecordPhase(IntEnum):
    NONE = 0
    OPEN = 1
    """On the device; nothing has asked for it yet."""
    QUEUED = 2
    COPYING = 3
    HOST_READY = 4
    WRITTEN = 5
    FAILED = 6


class Rescue(IntEnum):
    NONE = 0
    FLAGGED = 1
    PUBLISHED = 2


class Entry(NamedTuple):
    """One cell of a read: the write id it wants, its row once it is settled, and a row set aside for it."""

    write_id: int
    row: Halves | None
    rescue: Rescue = Rescue.NONE
    aside: Halves = NOTHING


class Read(NamedTuple):
    entries: tuple[Entry, ...]


class Batch(NamedTuple):
    """Entries to gather together once the writes named have landed."""

    read: int
    parts: tuple[tuple[int, int], ...]
    """(entry, write id)"""
    newest_id: int
    newest_record_id: int


class Gather(NamedTuple):
    """The batch the prefetch thread works on, and what it has read of each row."""

    batch: Batch
    first: tuple[int, ...]
    second: tuple[int, ...] | None = None


class Task(NamedTuple):
    """One entry of the committer's queue: a step's page, a block copy, or deferred records."""

    write_id: int
    page_of: int = 0
    copies: tuple[tuple[int, int], ...] = ()
    records: tuple[int, ...] = ()
    cells: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.records:
            return f"records of step {', '.join(map(str, self.records))}"
        return f"page of step {self.page_of}" if self.page_of else f"block copy (write {self.write_id})"


class Work(NamedTuple):
    """The task the committer works on."""

    task: Task
    stage: str
    write_id: int
    rows: Rows = ()
    rescues: tuple[tuple[int, int, int, Halves], ...] = ()
    """(read, entry, id it was flagged for, row set aside)"""


class Page(NamedTuple):
    """A staging page: who holds it, and what lies in it."""

    holders: frozenset[str] = frozenset()
    immediate: int = ABSENT
    deferred: Halves = NOTHING


class Bounce(NamedTuple):
    busy: bool = False
    deferred: Halves = NOTHING


class Ticket(NamedTuple):
    """A record's place in the device ring."""

    step: int
    start: int
    units: int
    returned: bool = False


class Record(NamedTuple):
    """A step's deferred rows."""

    phase: RecordPhase = RecordPhase.NONE
    write_id: int = 0
    page: int = -1
    bounce: int = -1


class StorageState:
    """Every field is an immutable value."""

    __slots__ = (
        "arena",
        "bounces",
        "builder",
        "closed",
        "digests",
        "failed",
        "floors",
        "forced_upto",
        "gather",
        "gathers",
        "ids_after_start",
        "landed_upto",
        "last_id",
        "latest",
        "page_copies",
        "pages",
        "pages_ready_upto",
        "phase",
        "pool",
        "queue",
        "reads",
        "record_landed_upto",
        "records",
        "ring_end",
        "ring_starts",
        "saving",
        "sides_lost",
        "stamps",
        "step",
        "step_pages",
        "steps",
        "tickets",
        "transfers",
        "version_floors",
        "work",
    )

    def __init__(self, scenario: Scenario) -> None:
        num_cells = scenario.num_slots * len(scenario.keys)
        numbers = range(len(scenario.steps) + 1)
        self.step = 1
        self.phase = "announce"
        self.saving: tuple[int, bool] | None = None
        self.closed = False
        self.failed = False
        # Logical tables, the engine thread's.
        self.last_id = 0
        self.ids_after_start = tuple(0 for _ in numbers)
        self.floors = (0,) * scenario.num_slots
        self.version_floors = (0,) * scenario.num_slots
        self.digests = (0,) * scenario.num_slots
        self.latest = (ABSENT,) * num_cells
        # Physical state, the committer's.
        self.pool: tuple[Halves, ...] = (NOTHING,) * num_cells
        self.stamps = (ABSENT,) * num_cells
        self.landed_upto = self.record_landed_upto = self.forced_upto = self.pages_ready_upto = 0
        self.queue: tuple[Task, ...] = ()
        self.work: Work | None = None
        # Host and device memory.
        self.pages = (Page(),) * scenario.staging_depth
        self.page_copies: tuple[int, ...] = ()
        self.bounces = (Bounce(),) * 2
        self.arena = (ABSENT,) * scenario.ring_units
        self.tickets: tuple[Ticket, ...] = ()
        self.ring_end = 0
        self.ring_starts = tuple(-1 for _ in numbers)
        self.transfers: tuple[tuple[int, int], ...] = ()
        """(step, half that moves next) of records on their way, in the order they were begun."""
        self.records = tuple(Record() for _ in numbers)
        # Reads, the prefetch thread, the consumer.
        self.reads: tuple[Read | str | None, ...] = (None,) * len(scenario.reads)
        self.gathers: tuple[Batch, ...] = ()
        self.gather: Gather | None = None
        self.sides_lost = 0
        self.steps = tuple(StepPhase.NOT_SAVED for _ in numbers)
        self.step_pages = tuple(-1 for _ in numbers)
        self.builder = 0

    def copy(self) -> "StorageState":
        twin = object.__new__(StorageState)
        for name in self.__slots__:
            setattr(twin, name, getattr(self, name))
        return twin

    def key(self) -> tuple[object, ...]:
        return _all_fields(self)


_all_fields = attrgetter(*StorageState.__slots__)


def put(values: tuple[Value, ...], index: int, value: Value) -> tuple[Value, ...]:
    """The same values with one exchanged."""
    return (*values[:index], value, *values[index + 1 :])
