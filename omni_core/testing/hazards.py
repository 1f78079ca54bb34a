# SPDX-License-Identifier: Apache-2.0
"""Hazards of asynchronous copies, and how one is told: what it is, and both sides of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from omni_core.backend.observer import ByteRange


class HazardKind(Enum):
    """What can go wrong between threads that share bytes without a lock."""

    READ_BEFORE_COPY = "bytes read before the copy that brings them is complete"
    WRITE_BEFORE_COPY = "bytes written while a copy into them is not complete"
    SOURCE_OVERWRITTEN = "a device buffer overwritten before its copy ran"
    EVENT_NOT_RECORDED = "a wait on an event that was never recorded"
    STAGING_REUSED = "a staging page reused while its step is open or its rows are not in the pool"
    TORCH_UNDER_LOCK = "a torch operation by the thread that holds the state lock"
    WAIT_UNDER_LOCK = "a wait by the thread that holds the state lock"
    ALLOCATION_UNDER_LOCK = "an allocation by the thread that holds the state lock"


@dataclass(frozen=True, slots=True)
class HazardSide:
    """One of the two that met."""

    thread: str
    """The thread, and the last checkpoint it passed."""
    doing: str
    """The operation, the copy or the step."""
    memory: ByteRange | None = None
    """The bytes it touches, where it touches any."""

    def __str__(self) -> str:
        return f"{self.thread}: {self.doing}" + (f" ({self.memory})" if self.memory else "")


@dataclass(frozen=True, slots=True)
class Hazard:
    """One hazard, found when its second side came."""

    kind: HazardKind
    acting: HazardSide
    """The side whose act made it a hazard."""
    other: HazardSide
    """What it collided with."""

    def __str__(self) -> str:
        return f"{self.kind.value}\n    {self.acting}\n    {self.other}"


class HazardError(AssertionError):
    """Hazards were found; the message names both sides of each."""

    def __init__(self, hazards: Sequence[Hazard]) -> None:
        super().__init__(f"{len(hazards)} hazards:\n" + "\n".join(f"  {hazard}" for hazard in hazards))
        self.hazards = tuple(hazards)

    @property
    def kinds(self) -> frozenset[HazardKind]:
        """The kinds found."""
        return frozenset(hazard.kind for hazard in self.hazards)
