# SPDX-License-Identifier: Apache-2.0
"""What goes wrong in a run, as data: drawn from a seed, or written down."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum

ENGINE = "engine"
COMMITTER = "omni-core-committer"
PREFETCHER = "omni-core-prefetch"
BUILDER = "sim-output-builder"


class FaultKind(Enum):
    """What can go wrong."""

    COPY_FAILS = "a copy fails and moves nothing"
    COPY_SLOW = "a copy takes long"
    COPIES_REORDERED = "copies take different times, so that those of different streams change places"
    ARENA_REFUSED = "pinned or device memory is refused when the cache is built"
    POOL_REFUSED = "address space for the rows of a new key is refused"
    ALLOCATION_FAILS = "host memory is refused to a thread of the cache"
    OPERATION_FAILS = "some torch operation of a thread of the cache fails"
    BIND_DIES = "the committer dies when it takes its device"
    WAIT_DIES = "the committer dies waiting for a copy"
    SINK_FAILS = "what takes the outputs fails with them in its hands"
    BUILDER_LATE = "outputs are built late"


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault."""

    kind: FaultKind
    number: int = 0
    """Which occurrence fails: 0 is the first copy, allocation, operation, wait or step of its kind."""
    thread: str = ""
    """For allocations and operations: whose."""
    seconds: float = 0.0
    """For slow copies, reordered copies (at most) and late builders."""

    def __str__(self) -> str:
        details = f" {self.number}"
        details += f", thread {self.thread!r}" if self.thread else ""
        details += f", {self.seconds} s" if self.seconds else ""
        return self.kind.name + details


SHORT_S = (0.001, 0.5, 8.0)
"""Delays that, even a few together, stay below every time-out of the defaults."""
LONG_S = 200.0
"""One above all of them."""


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """The faults of one run."""

    faults: tuple[Fault, ...]

    @classmethod
    def draw(cls, seed: int) -> FaultPlan:
        """One to three faults that depend on `seed` alone."""
        rng = random.Random(f"faults {seed}")
        return cls(tuple(_draw_fault(rng) for _ in range(rng.choice((1, 1, 1, 2, 3)))))

    def of(self, *kinds: FaultKind) -> tuple[Fault, ...]:
        """The faults of these kinds."""
        return tuple(fault for fault in self.faults if fault.kind in kinds)

    @property
    def exceeds_timeouts(self) -> bool:
        """Whether something takes longer than the cache waits."""
        return any(fault.seconds >= LONG_S for fault in self.faults)

    def __str__(self) -> str:
        return "; ".join(map(str, self.faults)) or "no faults"


def _draw_fault(rng: random.Random) -> Fault:
    kind = rng.choice(tuple(FaultKind))
    number = rng.choice((0, 1, 2, 3, 5, 8))
    thread = ""
    seconds = 0.0
    if kind is FaultKind.ALLOCATION_FAILS:
        thread = rng.choice((ENGINE, COMMITTER, PREFETCHER, BUILDER))
    elif kind is FaultKind.OPERATION_FAILS:
        thread = rng.choice((ENGINE, COMMITTER, PREFETCHER, BUILDER))
        number = rng.randrange(60)
    elif kind in (FaultKind.COPY_SLOW, FaultKind.BUILDER_LATE):
        seconds = rng.choice((*SHORT_S, LONG_S))
    elif kind is FaultKind.COPIES_REORDERED:
        seconds = rng.choice((0.001, 0.1, 1.0))
    elif kind in (FaultKind.ARENA_REFUSED, FaultKind.POOL_REFUSED):
        number = rng.randrange(3)
    elif kind is FaultKind.BIND_DIES:
        number = 0
    return Fault(kind, number, thread, seconds)
