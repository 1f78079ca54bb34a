# SPDX-License-Identifier: Apache-2.0
"""Breadth-first search over all states of a world, so that the first counterexample found is a shortest one."""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

MAX_STATES = 3_000_000


class Violation(Exception):  # noqa: N818 - it is a verdict, not an error of the checker
    """A property does not hold in the state just reached; `kind` is one of the letters of the README."""

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(f"({kind}) {what}")
        self.kind = kind


@dataclass(frozen=True)
class Move:
    """One atomic action of one thread.

    An `optional` one may never happen (pressure, a failure): a world that could go on only with it is stuck.
    """

    name: str
    apply: Callable[[Any], None]
    optional: bool = False


class State(Protocol):
    """Fields are immutable values; a copy may therefore be shallow."""

    def copy(self) -> "State": ...

    def key(self) -> Hashable: ...


class World(Protocol):
    def initial(self) -> State: ...

    def moves(self, state: State) -> Iterator[Move]:
        """Every action that some thread can take now. `Move.apply` changes the state it is given, or raises."""

    def check_at_rest(self, state: State) -> None:
        """Raises `Violation` if the state, in which nobody has to move any more, is not a good end."""


@dataclass(frozen=True)
class Verdict:
    """What the search came to."""

    num_states: int
    violation: Violation | None = None
    trace: tuple[str, ...] = ()
    """The actions that lead to the violation, in order."""

    @property
    def holds(self) -> bool:
        return self.violation is None

    @property
    def kind(self) -> str:
        return self.violation.kind if self.violation else ""

    def __str__(self) -> str:
        if self.violation is None:
            return f"holds in {self.num_states:,} states"
        actions = "\n".join(f"  {number:2}. {action}" for number, action in enumerate(self.trace, 1))
        return f"{self.violation} after {len(self.trace)} actions, {self.num_states:,} states seen:\n{actions}"


def explore(world: World, max_states: int = MAX_STATES) -> Verdict:
    """Visit every reachable state; stop at the first violation.

    Raises:
        RuntimeError: there are more than `max_states`; the world is too large for a verdict.
    """
    start = world.initial()
    came_from: dict[Hashable, tuple[Hashable, str] | None] = {start.key(): None}
    level = [start]
    while level:
        next_level = []
        for state in level:
            must_rest = True
            for move in world.moves(state):
                must_rest = must_rest and move.optional
                successor = state.copy()
                try:
                    move.apply(successor)
                except Violation as violation:
                    return Verdict(len(came_from), violation, (*_trace(came_from, state.key()), move.name))
                key = successor.key()
                if key not in came_from:
                    came_from[key] = (state.key(), move.name)
                    next_level.append(successor)
            if must_rest:
                try:
                    world.check_at_rest(state)
                except Violation as violation:
                    return Verdict(len(came_from), violation, _trace(came_from, state.key()))
        if len(came_from) > max_states:
            raise RuntimeError(f"more than {max_states:,} states")
        level = next_level
    return Verdict(len(came_from))


def _trace(came_from: dict[Hashable, tuple[Hashable, str] | None], key: Hashable) -> tuple[str, ...]:
    actions = []
    while (step := came_from[key]) is not None:
        key, action = step
        actions.append(action)
    return tuple(reversed(actions))
