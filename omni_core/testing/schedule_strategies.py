# SPDX-License-Identifier: Apache-2.0
"""Who runs next: the choices a seeded runtime makes at each point, drawn at random, by priority, or given."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


class Candidate(Protocol):
    """A thread that could run next."""

    @property
    def index(self) -> int:
        """Threads are numbered as they are started; the engine's is 0."""
        ...

    @property
    def name(self) -> str: ...


class Strategy(ABC):
    """Chooses among threads that could run. Asked only where there are at least two."""

    @abstractmethod
    def choose(self, candidates: Sequence[Candidate], current: Candidate, number: int) -> int:
        """The position in `candidates` of the thread that runs next.

        Args:
            candidates: at least two, in the order in which they became able to run.
            current: the thread that ran until now; not among the candidates if it waits or has ended.
            number: how many choices were made before.
        """

    def __str__(self) -> str:
        return type(self).__name__


class RandomChoice(Strategy):
    """Any candidate, each as likely.

    Args:
        rng: decides.
        stay: chance that the current thread goes on if it can. The higher, the longer the runs between two switches.
    """

    def __init__(self, rng: random.Random, stay: float = 0.0) -> None:
        self._random = rng.random
        self._stay = stay

    def choose(self, candidates: Sequence[Candidate], current: Candidate, number: int) -> int:
        if self._stay and self._random() < self._stay and current in candidates:
            return candidates.index(current)
        return int(self._random() * len(candidates))

    def __str__(self) -> str:
        return f"random, stays {self._stay:.0%}"


class Priorities(Strategy):
    """Each thread has a priority and the highest runs; at a few points the one that runs falls below all others.

    Finds a bug that needs `d` ordered events with a known least chance, where even choices would hardly ever meet them
    (Burckhardt et al., "A Randomized Scheduler with Probabilistic Guarantees of Finding Bugs", ASPLOS 2010).

    Args:
        rng: decides.
        num_changes: how often a priority falls.
        horizon: the changes lie among so many first choices.
    """

    def __init__(self, rng: random.Random, num_changes: int, horizon: int) -> None:
        self._rng = rng
        self._horizon = horizon
        self._changes = sorted(rng.randrange(horizon) for _ in range(num_changes))
        self._priorities: dict[int, float] = {}
        self._lowest = 0.0

    def choose(self, candidates: Sequence[Candidate], current: Candidate, number: int) -> int:
        while self._changes and self._changes[0] <= number:
            self._changes.pop(0)
            self._lowest -= 1.0
            self._priorities[current.index] = self._lowest
        best, best_priority = 0, -float("inf")
        for position, candidate in enumerate(candidates):
            priority = self._priorities.get(candidate.index)
            if priority is None:
                priority = self._priorities[candidate.index] = self._rng.random()
            if priority > best_priority:
                best, best_priority = position, priority
        return best

    def __str__(self) -> str:
        return f"priorities, changing within {self._horizon} choices"


class LateThreads(Strategy):
    """Threads that run only when no other can; among the rest, any.

    Args:
        rng: decides.
        late: beginnings of the names of those threads, such as `sim-output-builder`.
    """

    def __init__(self, rng: random.Random, late: tuple[str, ...]) -> None:
        self._rng = rng
        self._late = late

    def choose(self, candidates: Sequence[Candidate], current: Candidate, number: int) -> int:
        punctual = [at for at, candidate in enumerate(candidates) if not candidate.name.startswith(self._late)]
        return self._rng.choice(punctual or range(len(candidates)))

    def __str__(self) -> str:
        return f"late: {', '.join(self._late)}"


class PassingLateness(Strategy):
    """Some thread is late for a while, then another one is.

    Args:
        rng: decides.
        longest: most choices for which one thread is late.
    """

    def __init__(self, rng: random.Random, longest: int) -> None:
        self._rng = rng
        self._longest = longest
        self._late = -1
        self._until = 0

    def choose(self, candidates: Sequence[Candidate], current: Candidate, number: int) -> int:
        if number >= self._until:
            self._until = number + 1 + self._rng.randrange(self._longest)
            self._late = self._rng.choice(candidates).index
        punctual = [at for at, candidate in enumerate(candidates) if candidate.index != self._late]
        return self._rng.choice(punctual)

    def __str__(self) -> str:
        return f"one late for up to {self._longest} choices at a time"


@dataclass(frozen=True)
class Schedule:
    """A schedule as its differences from a plain one, in which a thread runs until it waits.

    Where the current thread waits, the plain schedule goes on with the candidate that has been able to run longest.
    """

    switches: Mapping[int, int]
    """Number of the choice → index of the thread chosen there."""

    def __str__(self) -> str:
        chosen = ", ".join(f"{number} → thread {index}" for number, index in sorted(self.switches.items()))
        return f"{len(self.switches)} choices against the plain schedule: {chosen or 'none'}"


PLAIN = Schedule({})


def plain_choice(candidates: Sequence[Candidate], current: Candidate) -> int:
    """What the plain schedule chooses."""
    return candidates.index(current) if current in candidates else 0


class Replayed(Strategy):
    """Follows a schedule; where the thread it names cannot run, chooses as the plain one does."""

    def __init__(self, schedule: Schedule) -> None:
        self._switches = dict(schedule.switches)

    def choose(self, candidates: Sequence[Candidate], current: Candidate, number: int) -> int:
        wanted = self._switches.get(number)
        if wanted is not None:
            for position, candidate in enumerate(candidates):
                if candidate.index == wanted:
                    return position
        return plain_choice(candidates, current)

    def __str__(self) -> str:
        return f"replayed, {len(self._switches)} choices given"


OFTEN_LATE = ("sim-output-builder", "omni-core-prefetch", "omni-core-committer", "cpu_sim", "engine")
"""Threads of a simulated stage, each of which some drawn strategy keeps waiting."""


def draw_strategy(seed: int) -> Strategy:
    """A strategy that depends on `seed` alone: over many seeds, every kind with every manner."""
    rng = random.Random(f"strategy {seed}")
    kind = rng.random()
    if kind < 0.15:
        return LateThreads(rng, (rng.choice(OFTEN_LATE),))
    if kind < 0.45:
        return RandomChoice(rng, stay=rng.choice((0.0, 0.5, 0.9, 0.98)))
    if kind < 0.75:
        return Priorities(rng, num_changes=rng.randint(0, 5), horizon=rng.choice((100, 1_000, 10_000)))
    return PassingLateness(rng, longest=rng.choice((20, 200, 2_000)))
