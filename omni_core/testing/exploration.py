# SPDX-License-Identifier: Apache-2.0
"""Runs one workload under many schedules, keeps the first that fails, makes it smaller, and runs it again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from omni_core.testing.hazards import HazardError
from omni_core.testing.schedule_strategies import Replayed, Schedule, Strategy
from omni_core.testing.schedule_trace import ScheduleTrace
from omni_core.testing.seeded_runtime import SeededRuntime

_SEEDS_PER_SIZE = 12
"""Schedules tried before a smaller size counts as one that does not fail."""

Run = Callable[[SeededRuntime, int], object]
"""What is run, on the runtime it is given and of the size it is given; raises if something is wrong.

It must depend on nothing else: equal runtimes and sizes are equal runs. What a size is, is the run's own matter
(requests, steps); one that has none ignores it.
"""


@dataclass(frozen=True, slots=True)
class Failure:
    """A schedule that failed."""

    seed: int
    """Of the runtime."""
    size: int
    schedule: Schedule | None
    """`None`: the one the seed draws; else the one to replay."""
    error: Exception
    trace: ScheduleTrace
    threads: str
    """Threads that had not ended when the error came, and what they waited for."""

    def __str__(self) -> str:
        by = f"seed {self.seed}" if self.schedule is None else f"{self.schedule}, drawn by seed {self.seed}"
        return (
            f"size {self.size}, {by}: {type(self.error).__name__}: {self.error}\n"
            f"threads:\n{self.threads}\nthe last of {self.trace.num_switches} switches:\n{self.trace}"
        )


@dataclass(frozen=True, slots=True)
class Exploration:
    """What was tried."""

    num_runs: int
    num_schedules: int
    """Different ones among the runs."""
    num_choices: int
    num_switches: int
    failure: Failure | None

    def check(self) -> None:
        """Raise the failure, if there was one.

        Raises:
            Exception: what the run raised, with seed and trace as a note.
        """
        if self.failure is not None:
            self.failure.error.add_note(str(self.failure))
            raise self.failure.error


class Explorer:
    """Tries schedules of one run. Engine thread of every run is the caller's.

    Args:
        run: what to try.
        size: how large.
        stall_limit_s: see `SeededRuntime`; below the run's time-outs, so that a lost wake-up is told as such.
        max_points: see `SeededRuntime`.
    """

    def __init__(
        self, run: Run, *, size: int = 1, stall_limit_s: float = float("inf"), max_points: int = 5_000_000
    ) -> None:
        self._run = run
        self._size = size
        self._stall_limit_s = stall_limit_s
        self._max_points = max_points

    def explore(self, seeds: Iterable[int]) -> Exploration:
        """Run the schedules these seeds draw, until one fails."""
        digests = set()
        num_runs = num_choices = num_switches = 0
        failure = None
        for seed in seeds:
            trace, failure = self._try(seed, self._size, None)
            num_runs += 1
            digests.add(trace.digest)
            num_choices += trace.num_choices
            num_switches += trace.num_switches
            if failure is not None:
                break
        return Exploration(num_runs, len(digests), num_choices, num_switches, failure)

    def replay(self, failure: Failure) -> Failure | None:
        """Run a failed schedule again; `None` if it does not fail this time."""
        return self._try(failure.seed, failure.size, failure.schedule)[1]

    def shrink(self, failure: Failure, *, max_runs: int = 300) -> Failure:
        """The same failure with a smaller run, then with fewer departures from the plain schedule.

        Args:
            failure: of `explore`.
            max_runs: how many runs to spend.

        Returns:
            The smallest failure found; `failure` itself if none was smaller. It fails again when replayed.
        """
        budget = _Budget(max_runs)
        smaller = self._with_less_work(failure, budget)
        return self._with_fewer_switches(smaller, budget)

    def _try(self, seed: int, size: int, schedule: Schedule | None) -> tuple[ScheduleTrace, Failure | None]:
        strategy: Strategy | None = None if schedule is None else Replayed(schedule)
        runtime = SeededRuntime(seed, strategy=strategy, stall_limit_s=self._stall_limit_s, max_points=self._max_points)
        threads = ""
        try:
            with runtime:
                try:
                    self._run(runtime, size)
                finally:
                    threads = runtime.describe()
        except Exception as error:
            return runtime.trace, Failure(seed, size, schedule, error, runtime.trace, threads)
        return runtime.trace, None

    def _fails_alike(
        self, failure: Failure, budget: _Budget, seed: int, size: int, schedule: Schedule | None
    ) -> Failure | None:
        if not budget.spend():
            return None
        found = self._try(seed, size, schedule)[1]
        return found if found is not None and _alike(found.error, failure.error) else None

    def _with_less_work(self, failure: Failure, budget: _Budget) -> Failure:
        sizes = sorted({1, 2, 3, failure.size // 8, failure.size // 4, failure.size // 2, failure.size * 3 // 4})
        for size in sizes:
            if not 0 < size < failure.size:
                continue
            for seed in (failure.seed, *range(_SEEDS_PER_SIZE)):
                found = self._fails_alike(failure, budget, seed, size, None)
                if found is not None:
                    return found
        return failure

    def _with_fewer_switches(self, failure: Failure, budget: _Budget) -> Failure:
        best = self._fails_alike(failure, budget, failure.seed, failure.size, failure.trace.schedule)
        if best is None:
            return failure
        kept = sorted(failure.trace.schedule.switches.items())
        step = max(1, len(kept) // 2)
        while kept and budget.left:
            smaller = False
            for start in range(0, len(kept), step):
                fewer = Schedule(dict(kept[:start] + kept[start + step :]))
                found = self._fails_alike(failure, budget, failure.seed, failure.size, fewer)
                if found is not None:
                    best, kept, smaller = found, sorted(fewer.switches.items()), True
                    break
            if not smaller:
                if step == 1:
                    break
                step = max(1, step // 2)
            else:
                step = max(1, min(step, len(kept) // 2))
        return best


class _Budget:
    def __init__(self, runs: int) -> None:
        self.left = runs

    def spend(self) -> bool:
        self.left -= 1
        return self.left >= 0


def _alike(found: Exception, wanted: Exception) -> bool:
    if isinstance(found, HazardError) and isinstance(wanted, HazardError):
        return bool(found.kinds & wanted.kinds)
    return type(found) is type(wanted)
