# SPDX-License-Identifier: Apache-2.0
"""One case of a fuzz run: a random workload, and the threads it runs on. Two numbers say everything about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Protocol, Self

from omni_core.runtime import Runtime, ThreadingRuntime
from omni_core.testing.fault_plan import Fault, FaultPlan
from omni_core.testing.fault_runs import run_with_faults
from omni_core.testing.fuzz_workloads import draw_fuzz_workload
from omni_core.testing.hazard_checker import HazardChecker
from omni_core.testing.seeded_runtime import SeededRuntime
from omni_core.testing.sim_stage import CacheWrapper
from omni_core.testing.workload_report import WorkloadReport
from omni_core.testing.workloads import run_workload

_STALL_LIMIT_S = 5.0
"""Virtual seconds all threads may wait at once: below the time-outs of the cache, so that a lost wake-up is named."""
_ONE_IN_FAULTY = 5
"""Of so many seeded schedules, one runs into faults."""


class FuzzThreads(Enum):
    """What a case runs on."""

    REAL = "real threads"
    SEEDED = "a seeded schedule, hazards watched"
    FAULTY = "a seeded schedule, faults injected"


class WorkloadRunner(Protocol):
    """Runs the workload of a seed; `run_simulated` does on the simulated scheduler."""

    def __call__(
        self,
        seed: int,
        *,
        runtime: Runtime,
        backend_options: Mapping[str, Any],
        wrap_cache: CacheWrapper | None = None,
    ) -> WorkloadReport:
        """Run it and judge every delivery; blocks until it is done.

        Args:
            seed: decides the workload.
            runtime: makes every thread.
            backend_options: of the simulated device, beside those of the workload.
            wrap_cache: put around the cache, to watch it.

        Raises:
            Exception: something was wrong.
        """


def run_simulated(
    seed: int,
    *,
    runtime: Runtime,
    backend_options: Mapping[str, Any],
    wrap_cache: CacheWrapper | None = None,
) -> WorkloadReport:
    """`WorkloadRunner` on the simulated scheduler."""
    config = draw_fuzz_workload(seed)
    stage = replace(config.stage, backend_options={**config.stage.backend_options, **backend_options})
    return run_workload(seed, replace(config, stage=stage), runtime=runtime, wrap_cache=wrap_cache)


@dataclass(frozen=True, slots=True)
class FuzzCase:
    """A workload on real threads (schedule 0), or under a seeded schedule."""

    workload_seed: int
    schedule: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """The case that prints as `text`, such as `17:3`.

        Raises:
            ValueError: it is not two numbers of at least 0.
        """
        workload_seed, _, schedule = text.partition(":")
        if not (workload_seed.isdecimal() and schedule.isdecimal()):
            raise ValueError(f"{text!r} is not WORKLOAD:SCHEDULE, two numbers of at least 0")
        return cls(int(workload_seed), int(schedule))

    def __str__(self) -> str:
        return f"{self.workload_seed}:{self.schedule}"

    @property
    def threads(self) -> FuzzThreads:
        """What it runs on."""
        if self.schedule == 0:
            return FuzzThreads.REAL
        faulty = (self.workload_seed + self.schedule) % _ONE_IN_FAULTY == 0
        return FuzzThreads.FAULTY if faulty else FuzzThreads.SEEDED

    @property
    def schedule_seed(self) -> int:
        """The seed of its schedule and of its faults: another for each workload."""
        return self.workload_seed * 1009 + self.schedule


@dataclass(frozen=True, slots=True)
class FuzzOutcome:
    """What a case came to."""

    case: FuzzCase
    report: WorkloadReport | None
    """`None`: it failed. Of a case with faults: the run after the reset."""
    error: Exception | None = None
    faults: tuple[Fault, ...] = ()
    """Those that happened."""
    cache_failed: bool = False
    """Whether a fault made the cache refuse everything until it was reset, as it must."""
    schedule_digest: str | None = None
    """Equal for equal schedules; `None`: real threads."""
    num_choices: int = 0
    """Points at which the seeded schedule chose who goes next."""
    num_accesses: int = 0
    """Torch operations the hazard checker looked at."""


def run_case(case: FuzzCase, run: WorkloadRunner = run_simulated) -> FuzzOutcome:
    """Run one case. Blocks until it is done: about a second.

    Args:
        case: which.
        run: runs its workload; a case with faults has its own way to, on the simulated scheduler.

    Returns:
        What it came to. An error of any kind is an outcome; only an interrupt is raised.
    """
    try:
        if case.threads is FuzzThreads.REAL:
            report = run(case.workload_seed, runtime=ThreadingRuntime(), backend_options={})
            return FuzzOutcome(case, report)
        if case.threads is FuzzThreads.FAULTY:
            return _run_into_faults(case)
        return _run_watched(case, run)
    except Exception as error:
        return FuzzOutcome(case, None, error)


def _run_watched(case: FuzzCase, run: WorkloadRunner) -> FuzzOutcome:
    with SeededRuntime(case.schedule_seed, stall_limit_s=_STALL_LIMIT_S) as runtime, HazardChecker(runtime) as checker:
        report = run(
            case.workload_seed,
            runtime=checker.runtime,
            backend_options={"copy_parts": 2, "observer": checker.device},
            wrap_cache=checker.watch_cache,
        )
    return FuzzOutcome(
        case,
        report,
        schedule_digest=runtime.trace.digest,
        num_choices=runtime.trace.num_choices,
        num_accesses=checker.num_accesses,
    )


def _run_into_faults(case: FuzzCase) -> FuzzOutcome:
    plan = FaultPlan.draw(case.schedule_seed)
    with SeededRuntime(case.schedule_seed) as runtime:
        found = run_with_faults(case.workload_seed, plan, runtime, draw_fuzz_workload(case.workload_seed))
    return FuzzOutcome(
        case,
        found.after,
        faults=found.injected,
        cache_failed=found.sticky,
        schedule_digest=runtime.trace.digest,
        num_choices=runtime.trace.num_choices,
    )
