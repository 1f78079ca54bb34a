# SPDX-License-Identifier: Apache-2.0
"""What a seeded run chose: enough to print it, to compare two runs, and to run it again with fewer switches."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from omni_core.testing.schedule_strategies import Candidate, Schedule, plain_choice

_Entry = tuple[int, str, str, str]
"""Number of the choice, the thread that ran, the point it had come to, the thread that ran next."""


class ScheduleTrace:
    """Every choice among two or more threads, in order."""

    __slots__ = ("_differences", "_entries", "num_choices")

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._differences: dict[int, int] = {}
        self.num_choices = 0

    def add(self, candidates: Sequence[Candidate], current: Candidate, chosen: Candidate, point: str) -> None:
        """Note a choice."""
        number = self.num_choices
        self.num_choices = number + 1
        if chosen is not current:
            self._entries.append((number, current.name, point, chosen.name))
        if candidates[plain_choice(candidates, current)] is not chosen:
            self._differences[number] = chosen.index

    @property
    def num_switches(self) -> int:
        """Choices after which another thread ran."""
        return len(self._entries)

    @property
    def schedule(self) -> Schedule:
        """What to give to `Replayed` for the same run."""
        return Schedule(dict(self._differences))

    @property
    def digest(self) -> str:
        """Equal for equal runs, also in another process."""
        text = repr((self.num_choices, self._entries))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def lines(self, last: int | None = None) -> list[str]:
        """The switches, one a line, or the last ones only."""
        entries = self._entries if last is None else self._entries[-last:]
        return [f"#{number} {ran} at {point!r} → {following}" for number, ran, point, following in entries]

    def __str__(self) -> str:
        left_out = max(0, len(self._entries) - 40)
        head = [f"… {left_out} switches before"] if left_out else []
        return "\n".join([*head, *self.lines(40)])
