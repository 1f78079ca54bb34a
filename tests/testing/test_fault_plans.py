# SPDX-License-Identifier: Apache-2.0
"""Faults of every kind, in the middle of a workload: typed errors, no hang, and a whole cache after `reset()`."""

from dataclasses import replace

import pytest

from omni_core.prefix_cache.errors import CacheFailedError, HostMemoryError, OmniPrefixCacheStagingTimeoutError
from omni_core.testing import OracleViolationError, SchedulerConfig, StageConfig, WorkloadConfig, hidden_key
from omni_core.testing.fault_injection import (
    InjectedCopyError,
    InjectedDeath,
    InjectedMemoryError,
    InjectedOperationError,
    InjectedSinkError,
)
from omni_core.testing.fault_plan import (
    BUILDER,
    COMMITTER,
    ENGINE,
    LONG_S,
    PREFETCHER,
    Fault,
    FaultKind,
    FaultPlan,
)
from omni_core.testing.fault_runs import run_with_faults
from omni_core.testing.seeded_runtime import SeededRuntime

SCHEDULER = SchedulerConfig(num_blocks=24, block_size=4, max_num_tokens=24, max_num_requests=4)
CONFIG = WorkloadConfig(StageConfig(SCHEDULER, threaded_builder=True), hidden_key(4), (), num_requests=8)
SCHEDULES = range(2)
NUM_DRAWN = 16


def outcomes_of(fault, *, num_requests=8):
    """How runs into one fault end, under several schedules. The fault happens in each."""
    reports = []
    for seed in SCHEDULES:
        with SeededRuntime(seed) as runtime:
            config = replace(CONFIG, num_requests=num_requests)
            reports.append(run_with_faults(1, FaultPlan((fault,)), runtime, config))
    assert all(report.injected == (fault,) for report in reports), "the fault never came"
    assert all(report.after.rows_delivered > 0 for report in reports)
    return reports


def causes(error):
    while error is not None:
        yield type(error)
        error = error.__cause__


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (Fault(FaultKind.COPY_FAILS, 2), InjectedCopyError),
        (Fault(FaultKind.BIND_DIES), InjectedDeath),
        (Fault(FaultKind.WAIT_DIES, 1), InjectedDeath),
        (Fault(FaultKind.OPERATION_FAILS, 5, COMMITTER), InjectedOperationError),
    ],
    ids=str,
)
def test_a_write_that_fails_is_sticky_until_reset(fault, cause):
    for report in outcomes_of(fault):
        assert report.sticky
        if report.error is not None:  # else the failure came too late for the run to notice
            assert isinstance(report.error, CacheFailedError)
            assert cause in causes(report.error)


@pytest.mark.parametrize(
    "fault",
    [
        Fault(FaultKind.COPY_SLOW, 1, seconds=8.0),
        Fault(FaultKind.COPIES_REORDERED, seconds=0.5),
        Fault(FaultKind.BUILDER_LATE, 2, seconds=8.0),
        Fault(FaultKind.ARENA_REFUSED, 0),
        Fault(FaultKind.ARENA_REFUSED, 2),
    ],
    ids=str,
)
def test_what_is_late_or_refused_in_time_harms_no_row(fault):
    for report in outcomes_of(fault):
        assert report.error is None
        assert not report.sticky


@pytest.mark.parametrize(
    ("fault", "raised"),
    [
        (Fault(FaultKind.OPERATION_FAILS, 7, ENGINE), InjectedOperationError),
        (Fault(FaultKind.POOL_REFUSED, 0), HostMemoryError),
    ],
    ids=str,
)
def test_what_fails_in_a_save_is_raised_there_and_the_cache_goes_on(fault, raised):
    for report in outcomes_of(fault):
        assert type(report.error) is raised
        assert not report.sticky


@pytest.mark.parametrize(
    ("fault", "raised"),
    [
        (Fault(FaultKind.OPERATION_FAILS, 3, BUILDER), InjectedOperationError),
        (Fault(FaultKind.ALLOCATION_FAILS, 0, BUILDER), InjectedMemoryError),
        (Fault(FaultKind.SINK_FAILS, 1), InjectedSinkError),
    ],
    ids=str,
)
def test_a_builder_that_dies_is_seen_as_such_or_as_who_holds_staging_and_the_cache_goes_on(fault, raised):
    for report in outcomes_of(fault):
        if isinstance(report.error, OmniPrefixCacheStagingTimeoutError):
            assert "slots are held by unread steps" in str(report.error)
        else:
            assert type(report.error) is raised
        assert not report.sticky


def test_a_read_that_fails_is_its_requests_error_alone():
    for report in outcomes_of(Fault(FaultKind.OPERATION_FAILS, 0, PREFETCHER)):
        assert isinstance(report.error, OracleViolationError), "to the judge a row was withheld"
        assert "ReadFailedError" in str(report.error)
        assert not report.sticky


def test_a_copy_slower_than_every_time_limit_is_a_typed_error_and_its_page_comes_back():
    for report in outcomes_of(Fault(FaultKind.COPY_SLOW, 1, seconds=LONG_S)):
        assert isinstance(report.error, CacheFailedError | TimeoutError)


def test_a_builder_later_than_every_time_limit_makes_the_engine_say_who_holds_staging():
    for report in outcomes_of(Fault(FaultKind.BUILDER_LATE, 0, seconds=LONG_S)):
        assert isinstance(report.error, TimeoutError)
        if isinstance(report.error, OmniPrefixCacheStagingTimeoutError):
            assert "slots are held by unread steps" in str(report.error)


def test_a_committer_hit_while_it_waits_for_a_copy_nobody_wants_goes_on():
    failed_then_late = (Fault(FaultKind.COPY_FAILS, 1), Fault(FaultKind.COPY_SLOW, 2, seconds=8.0))
    hit = 0
    for seed in range(4):
        with SeededRuntime(seed) as runtime:
            plan = FaultPlan((*failed_then_late, Fault(FaultKind.WAIT_DIES, 2)))
            report = run_with_faults(1, plan, runtime, replace(CONFIG, num_requests=8))
        hit += report.plan.faults[-1] in report.injected
    assert hit > 0


def test_drawn_plans_have_only_outcomes_a_fault_may_have():
    happened = set()
    for seed in range(NUM_DRAWN):
        with SeededRuntime(seed) as runtime:
            report = run_with_faults(seed, FaultPlan.draw(seed), runtime, CONFIG)
        happened.update(fault.kind for fault in report.injected)
    assert len(happened) >= 6


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_drawn_plans_of_drawn_workloads_have_only_outcomes_a_fault_may_have():
    happened = set()
    for seed in range(400):
        draw = WorkloadConfig.draw_cramped if seed % 2 else WorkloadConfig.draw
        config = draw(seed)
        stage = replace(config.stage, threaded_builder=seed % 3 != 0)
        with SeededRuntime(seed) as runtime:
            plan = FaultPlan.draw(seed)
            report = run_with_faults(seed, plan, runtime, replace(config, num_requests=12, stage=stage))
        happened.update(fault.kind for fault in report.injected)
    assert happened == set(FaultKind)


def test_a_plan_depends_on_its_seed_alone_and_says_what_it_is():
    assert FaultPlan.draw(5) == FaultPlan.draw(5)
    assert {fault.kind for seed in range(100) for fault in FaultPlan.draw(seed).faults} == set(FaultKind)
    plan = FaultPlan((Fault(FaultKind.COPY_FAILS, 2), Fault(FaultKind.ALLOCATION_FAILS, 1, BUILDER)))
    assert str(plan) == "COPY_FAILS 2; ALLOCATION_FAILS 1, thread 'sim-output-builder'"
    assert str(FaultPlan(())) == "no faults"
    with SeededRuntime(1) as runtime:
        assert run_with_faults(1, FaultPlan(()), runtime, CONFIG).error is None
