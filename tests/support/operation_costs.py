# SPDX-License-Identifier: Apache-2.0
"""The cost of a call as one value, what a call may cost, and how that may grow."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace

import omni_core_cpu_sim
from operation_counts import (
    CallCounts,
    TorchCounts,
    WatchedRuntime,
    no_garbage_collection,
    prepare_torch_counting,
    profiled_calls,
    torch_operations,
)

import omni_core

TABLE_PYTHON = (3, 11)
"""Interpreters differ in the calls they show a profiler. Budgets of calls are exact on this one; on others calls still
have to grow as the budget says."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one call of the cache on the thread that makes it, or of one step on a helper thread."""

    torch_ops: int = 0
    locks: int = 0
    python_calls: int = 0
    """Of Python functions, by the code of omni_core and, on a caller's thread, of cpu_sim. A lock is two of them."""
    c_calls: int = 0
    """Of functions written in C, by the same code."""

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(mine + its for mine, its in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: Cost) -> Cost:
        return self + other * -1

    def __mul__(self, times: int) -> Cost:
        return Cost(*(mine * times for mine in astuple(self)))

    def with_calls_of(self, other: Cost) -> Cost:
        """This cost with the calls of another one."""
        return replace(self, python_calls=other.python_calls, c_calls=other.c_calls)


NOTHING = Cost()


@dataclass(frozen=True, slots=True)
class Budget:
    """What a call costs: `fixed`, and `each` for every one of what it may grow with."""

    fixed: Cost
    each: Cost = NOTHING
    per: str = ""
    """What `each` is counted in; empty for a call that costs the same whatever it is about."""

    def at(self, size: int) -> Cost:
        """What the call costs for `size` of them."""
        return self.fixed + self.each * size

    def of(self, size: int) -> Budget:
        """The budget of a load that has always `size` of them, whatever else of it grows."""
        return Budget(self.at(size))

    def on_this_python(self, measured: Mapping[int, Cost]) -> Budget:
        """The same budget with the calls this interpreter shows: those of the two smallest sizes."""
        if sys.version_info[:2] == TABLE_PYTHON:
            return self
        small, larger = sorted(measured)[:2]
        rise = measured[larger] - measured[small]
        each = Cost(*(whole // (larger - small) for whole in astuple(rise))) if self.per else NOTHING
        fixed = measured[small] - each * small
        return Budget(self.fixed.with_calls_of(fixed), self.each.with_calls_of(each), self.per)


@dataclass(frozen=True, slots=True)
class Meter:
    """What one thread has done so far inside a block."""

    ops: TorchCounts
    calls: CallCounts
    locks: list[str]
    """Names, in the order they were taken."""

    @property
    def cost(self) -> Cost:
        """It as a value, which does not change any more."""
        return Cost(self.ops.total, len(self.locks), self.calls.python, self.calls.c)


def assert_costs(measured: Mapping[int, Cost], budget: Budget) -> None:
    """For every size measured, the call costs what its budget says."""
    budget = budget.on_this_python(measured)
    wrong = [f"at {size}: {cost}, not {budget.at(size)}" for size, cost in measured.items() if cost != budget.at(size)]
    assert not wrong, "; ".join([f"may grow with {budget.per or 'nothing'}", *wrong])


class CountedRuntime(WatchedRuntime):
    """Counts what each thread does: a caller's inside `metered()`, a helper's from its first line."""

    def __init__(self) -> None:
        prepare_torch_counting()
        super().__init__()
        self._helpers: dict[str, Meter] = {}

    @contextmanager
    def metered(self) -> Iterator[Meter]:
        """Count what the calling thread does inside the block."""
        with (
            no_garbage_collection(),
            torch_operations() as ops,
            self.locks_taken() as locks,
            profiled_calls(omni_core, omni_core_cpu_sim) as calls,
        ):
            yield Meter(ops, calls, locks)

    @contextmanager
    def around_helper(self) -> Iterator[None]:
        """Count what a helper thread does.

        A helper waits for the backend's copies. How often it looks, and which lock of the backend it takes for that,
        depends on who is first, so only what omni_core itself does is counted here.
        """
        with torch_operations() as ops, self.locks_taken() as locks, profiled_calls(omni_core) as calls:
            self._helpers[threading.current_thread().name] = Meter(ops, calls, locks)
            yield

    def spent_by(self, thread: str) -> Cost:
        """What the helper of that name has cost so far. Exact while it sleeps."""
        meter = self._helpers[thread]
        own_locks = sum(not name.startswith("cpu_sim.") for name in meter.locks)
        return Cost(meter.ops.total, own_locks, meter.calls.python, meter.calls.c)
