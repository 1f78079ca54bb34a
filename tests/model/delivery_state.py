# SPDX-License-Identifier: Apache-2.0
"""One state of the delivery world: what the engine did with one request, and what the cache believes and owes."""

from enum import IntEnum
from operator import attrgetter
from typing import NamedTuple

from .delivery_rules import DeliveryWorldSize

Content = tuple[int, int]
"""What a row is of: the version of the request that first had this token prefix, and the position."""
REJECTED = -1
FOREIGN = -2
"""In place of a version: a row of a rejected draft, and a row of another request."""
Positions = frozenset[int]
NO_POSITIONS: Positions = frozenset()
Rows = tuple[tuple[int, Content | None], ...]
"""(position, content of the row, or no row)"""


class Phase(IntEnum):
    NEW = 0
    RUNNING = 1
    PREEMPTED = 2
    OVER = 3


class Life(NamedTuple):
    """A life or version of the request that has ended: how far it came, and which contents its rows had."""

    reached: int
    origins: tuple[int, ...]


class Run(NamedTuple):
    """One step's run of the request: positions `[first, end)`."""

    number: int
    first: int
    end: int
    num_drafts: int
    num_valid: int
    """Rows at its start that are not of rejected drafts."""
    num_sampled: int


class OpenStep(NamedTuple):
    """A saved step that nobody has consumed."""

    serial: int
    run: Run
    num_before: int
    """Rows at the start of its run that were promised before."""
    hit: Rows = ()
    owed: Rows = ()
    failed: bool = False
    """Its rows are of a content that was replaced since."""


class HandedOver(NamedTuple):
    """Rows in the consumer's hands, not acknowledged."""

    serial: int
    rows: Rows
    carried_owed: bool


class DeliveryState:
    """Every field is an immutable value."""

    __slots__ = (
        "backing_off",
        "blocks",
        "cache_table",
        "computed",
        "computed_upto",
        "delivered",
        "draft_floor",
        "entering",
        "handed_over",
        "held",
        "hit",
        "known",
        "last_taken",
        "lives",
        "missing",
        "old_blocks",
        "open_steps",
        "origins",
        "phase",
        "preemptions",
        "promised_upto",
        "reached",
        "replaced",
        "reported",
        "rows",
        "serial",
        "steps",
        "table",
        "thefts",
    )

    def __init__(self, size: DeliveryWorldSize) -> None:
        # The engine: what it knows of the request, and what its KV cache holds.
        self.phase = Phase.NEW
        self.entering = False
        """The step under way let the request in and has not run it."""
        self.steps = self.preemptions = self.thefts = 0
        self.known = size.prompt_tokens
        self.computed = self.reached = 0
        """Tokens whose KV is there now, and the most there ever were, in this version."""
        self.origins = (1,) * size.max_tokens
        self.table: tuple[int, ...] = ()
        self.blocks: tuple[Content | None, ...] = (None,) * size.num_blocks
        self.lives: tuple[Life, ...] = (Life(0, ()),)
        """Per serial that has ended."""
        # The cache: its rows, one per block, and what it believes of the request.
        self.rows: tuple[Content | None, ...] = (None,) * size.num_blocks
        self.cache_table: tuple[int, ...] = ()
        self.held: tuple[bool, ...] = ()
        """Per block of its table, whether the block has begun no tenancy since it came there."""
        self.serial = 0
        self.computed_upto = self.promised_upto = self.draft_floor = 0
        self.missing = NO_POSITIONS
        self.backing_off = False
        self.hit: Rows = ()
        """The read planned for the step under way."""
        self.replaced = NO_POSITIONS
        """Serials whose content was replaced."""
        self.old_blocks: tuple[int, ...] = ()
        """Per position, the block it was first computed in; only wrong rules look there."""
        # The consumer. Delivered and reported are sets of (serial, position).
        self.open_steps: tuple[OpenStep, ...] = ()
        self.handed_over: tuple[HandedOver, ...] = ()
        self.delivered: frozenset[tuple[int, int]] = frozenset()
        self.reported: frozenset[tuple[int, int]] = frozenset()
        self.last_taken = True
        """The last step that was consumed was delivered."""

    def copy(self) -> "DeliveryState":
        twin = object.__new__(DeliveryState)
        for name in self.__slots__:
            setattr(twin, name, getattr(self, name))
        return twin

    def key(self) -> tuple[object, ...]:
        return _all_fields(self)

    def content(self, position: int, serial: int | None = None) -> Content:
        """What the row at a position is of, in the present version or in an ended one."""
        origins = self.origins if serial in (None, self.serial) else self.lives[serial].origins
        return (origins[position], position)

    @property
    def free_blocks(self) -> tuple[int, ...]:
        """Blocks the request does not hold, lowest first."""
        return tuple(block for block in range(len(self.blocks)) if block not in self.table)


_all_fields = attrgetter(*DeliveryState.__slots__)
