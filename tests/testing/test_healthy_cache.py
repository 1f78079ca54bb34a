# SPDX-License-Identifier: Apache-2.0
"""The real cache under many schedules, and under frequent real switches: rows right, nothing blamed, nobody stuck."""

from dataclasses import replace

import pytest

from omni_core.runtime import ThreadingRuntime
from omni_core.testing.exploration import Explorer
from omni_core.testing.stress import frequent_switches
from omni_core.testing.watched_workload import run_watched_workload
from omni_core.testing.workload_config import WorkloadConfig
from omni_core.testing.workloads import run_workload

NUM_WORKLOADS = 12
SCHEDULES_EACH = 9
NUM_REQUESTS = 5
STALL_LIMIT_S = 5.0
"""Far below the cache's time limits: a wait that only its time limit ends is a lost wake-up."""


def small(seed, num_requests=NUM_REQUESTS, *, threaded_builder=True):
    draw = WorkloadConfig.draw_cramped if seed % 2 else WorkloadConfig.draw
    config = draw(seed)
    return replace(config, num_requests=num_requests, stage=replace(config.stage, threaded_builder=threaded_builder))


def explore(seed, schedules, num_requests=NUM_REQUESTS):
    config = small(seed, num_requests)
    explorer = Explorer(
        lambda runtime, size: run_watched_workload(seed, replace(config, num_requests=size), runtime),
        size=num_requests,
        stall_limit_s=STALL_LIMIT_S,
    )
    return explorer.explore(schedules)


def test_no_schedule_of_a_small_workload_is_wrong_or_only_lucky():
    explorations = [explore(seed, range(SCHEDULES_EACH)) for seed in range(NUM_WORKLOADS)]
    for exploration in explorations:
        exploration.check()
    assert sum(each.num_schedules for each in explorations) > 100
    assert sum(each.num_switches for each in explorations) > 5_000


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_schedule_of_many_workloads_is_wrong_or_only_lucky():
    for seed in range(40):
        explore(seed, range(30), num_requests=12).check()


@pytest.mark.parametrize("seed", [4, 5])
def test_rows_are_right_under_frequent_switches_of_real_threads(seed):
    with frequent_switches():
        report = run_watched_workload(seed, small(seed, 12), ThreadingRuntime())
    assert report.rows_delivered > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_rows_are_right_under_frequent_switches_for_long():
    with frequent_switches():
        for seed in range(100):
            run_workload(seed, small(seed, 40))
