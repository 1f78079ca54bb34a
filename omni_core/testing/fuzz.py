# SPDX-License-Identifier: Apache-2.0
"""Runs random workloads under many schedules and into faults until enough was done, and counts what was checked.

Every delivered row is judged as it comes (`StageOracle`), every schedule is watched for hazards, and whatever fails is
kept with the case that fails again.
"""

from __future__ import annotations

import itertools
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from omni_core.runtime import ThreadingRuntime
from omni_core.testing.fault_plan import FaultKind
from omni_core.testing.fuzz_cases import FuzzCase, FuzzOutcome, FuzzThreads, WorkloadRunner, run_case, run_simulated
from omni_core.testing.hazards import HazardError
from omni_core.testing.row_kinds import RowKind

WORKLOADS_PER_SEED = 1_000_000
"""Two fuzz seeds have no workload in common."""


@dataclass(frozen=True, slots=True)
class FuzzPlan:
    """What to run: workloads of a seed, each on real threads and under `schedules` seeded schedules."""

    seed: int = 0
    max_steps: int | None = None
    """Engine steps after which no further case begins; `None`: no limit."""
    max_seconds: float | None = None
    """The same for real time."""
    max_failures: int = 20
    schedules: int = 1
    shard: int = 0
    """Of `num_shards` processes, which one this is: they share the workloads of the seed among them."""
    num_shards: int = 1

    def cases(self) -> Iterator[FuzzCase]:
        """Every case, without end."""
        first = self.seed * WORKLOADS_PER_SEED + self.shard
        for workload_seed in itertools.count(first, self.num_shards):
            for schedule in range(self.schedules + 1):
                yield FuzzCase(workload_seed, schedule)


@dataclass(frozen=True, slots=True)
class FuzzFailure:
    """A case that failed."""

    case: str
    threads: str
    error: str
    """Type and message."""
    details: str
    """Traceback and notes."""

    @classmethod
    def of(cls, case: FuzzCase, error: Exception) -> FuzzFailure:
        """What is kept of a case and what it raised."""
        details = "".join(traceback.format_exception(error))
        return cls(str(case), case.threads.value, f"{type(error).__name__}: {error}", details)


@dataclass(slots=True)
class FuzzReport:
    """What was done and found so far."""

    seed: int
    seconds: float = 0.0
    steps: int = 0
    requests: int = 0
    rows_delivered: int = 0
    rows: Counter[str] = field(default_factory=Counter)
    """Rows checked, by `RowKind.name`; a row can be of several kinds."""
    requests_by_fate: Counter[str] = field(default_factory=Counter)
    runs: Counter[str] = field(default_factory=Counter)
    """Cases run to their end, by `FuzzThreads.name`."""
    schedules: int = 0
    """Different seeded schedules."""
    choices: int = 0
    """Points at which a seeded schedule chose who goes next."""
    torch_operations_watched: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    """Faults injected, by `FaultKind.name`."""
    caches_failed: int = 0
    """Caches that a fault made refuse everything until they were reset, as they must."""
    hazards: int = 0
    failures: list[FuzzFailure] = field(default_factory=list)
    _digests: set[str] = field(default_factory=set, repr=False)

    def add(self, outcome: FuzzOutcome) -> None:
        """Count one case."""
        if outcome.error is not None:
            self.hazards += len(outcome.error.hazards) if isinstance(outcome.error, HazardError) else 0
            self.failures.append(FuzzFailure.of(outcome.case, outcome.error))
        report = outcome.report
        if report is None:
            return
        self.runs[outcome.case.threads.name] += 1
        self.steps += report.num_steps
        self.requests += report.num_requests
        self.rows_delivered += report.rows_delivered
        self.rows.update({kind.name: count for kind, count in report.rows.items()})
        self.requests_by_fate.update(
            aborted=report.requests_aborted,
            refused=report.requests_failed,
            partial=report.requests_partial,
            replaced=report.requests_replaced,
        )
        if outcome.schedule_digest is not None:
            self._digests.add(outcome.schedule_digest)
            self.schedules = len(self._digests)
        self.choices += outcome.num_choices
        self.torch_operations_watched += outcome.num_accesses
        self.faults.update(fault.kind.name for fault in outcome.faults)
        self.caches_failed += outcome.cache_failed

    def as_document(self) -> dict[str, Any]:
        """Everything, as JSON has it; every kind of row, run and fault is named, also with 0."""
        return {
            "seed": self.seed,
            "seconds": round(self.seconds, 3),
            "steps": self.steps,
            "requests": {"all": self.requests, **self.requests_by_fate},
            "rows_delivered": self.rows_delivered,
            "rows_checked": {kind.name: self.rows[kind.name] for kind in RowKind},
            "runs": {threads.name: self.runs[threads.name] for threads in FuzzThreads},
            "schedules": self.schedules,
            "choices": self.choices,
            "torch_operations_watched": self.torch_operations_watched,
            "faults_injected": {kind.name: self.faults[kind.name] for kind in FaultKind},
            "caches_failed": self.caches_failed,
            "hazards": self.hazards,
            "failures": [
                {"case": f.case, "threads": f.threads, "error": f.error, "details": f.details} for f in self.failures
            ],
        }

    def add_document(self, document: Mapping[str, Any]) -> None:
        """Count what another process did: its `as_document()`. Its schedules are of other workloads."""
        fates = dict(document["requests"])
        self.seconds = max(self.seconds, document["seconds"])
        self.steps += document["steps"]
        self.requests += fates.pop("all")
        self.requests_by_fate.update(fates)
        self.rows_delivered += document["rows_delivered"]
        self.rows.update(document["rows_checked"])
        self.runs.update(document["runs"])
        self.schedules += document["schedules"]
        self.choices += document["choices"]
        self.torch_operations_watched += document["torch_operations_watched"]
        self.faults.update(document["faults_injected"])
        self.caches_failed += document["caches_failed"]
        self.hazards += document["hazards"]
        self.failures.extend(FuzzFailure(**failure) for failure in document["failures"])


def fuzz(
    plan: FuzzPlan,
    *,
    run: WorkloadRunner = run_simulated,
    on_progress: Callable[[FuzzReport], None] | None = None,
) -> FuzzReport:
    """Run cases until the plan's limit, or until too many have failed. Blocks so long.

    Args:
        plan: what to run.
        run: runs a workload.
        on_progress: shown the report after each case.
    """
    clock = ThreadingRuntime()
    started_s = clock.monotonic_s()
    report = FuzzReport(plan.seed)
    for case in plan.cases():
        report.add(run_case(case, run))
        report.seconds = clock.monotonic_s() - started_s
        if on_progress is not None:
            on_progress(report)
        if (
            len(report.failures) >= plan.max_failures
            or (plan.max_steps is not None and report.steps >= plan.max_steps)
            or (plan.max_seconds is not None and report.seconds >= plan.max_seconds)
        ):
            break
    return report
