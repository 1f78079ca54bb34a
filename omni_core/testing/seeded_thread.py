# SPDX-License-Identifier: Apache-2.0
"""What a seeded runtime knows of one of its threads."""

from __future__ import annotations

from typing import Protocol

from omni_core.testing.os_threads import Baton


class OwnedLock(Protocol):
    """A lock a thread waits for."""

    @property
    def owner(self) -> SeededThread | None: ...


class SeededThread:
    """What the scheduler knows of one thread."""

    __slots__ = (
        "baton",
        "blocked",
        "deadline_s",
        "ended",
        "error",
        "held",
        "ident",
        "index",
        "interrupted",
        "killed",
        "last_checkpoint",
        "name",
        "pending",
        "timed_out",
        "waits_for",
        "wants",
    )

    def __init__(self, index: int, name: str) -> None:
        self.index = index
        self.name = name
        self.ident = 0
        self.baton = Baton()
        self.blocked = False
        self.deadline_s: float | None = None
        self.timed_out = False
        self.waits_for = ""
        self.wants: OwnedLock | None = None
        self.held: list[str] = []
        self.last_checkpoint = ""
        self.pending: BaseException | None = None
        self.interrupted = False
        """An exception was raised in a wait: locks may have been lost."""
        self.killed = 0
        self.ended = False
        self.error: BaseException | None = None

    def __str__(self) -> str:
        doing = f"waits for {self.waits_for}" if self.blocked else "could run"
        if self.blocked and self.deadline_s is not None:
            doing += f" until {self.deadline_s:.6g} s"
        holds = f", holds {', '.join(map(repr, self.held))}" if self.held else ", holds no lock"
        last = f", last passed {self.last_checkpoint!r}" if self.last_checkpoint else ""
        return f"thread {self.index} {self.name!r} {doing}{holds}{last}"
