# SPDX-License-Identifier: Apache-2.0
"""Random workloads through the real cache: every delivered row is the right row, whatever engine and builder do.

The oracle judges each delivery; a wrong one raises `OracleViolationError` with the seed. Replay one with
`run_workload(seed)`.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st

from omni_core.testing import FakeKey, FakeModel, RowKind, SimRequest, SimStage, StageConfig, hidden_key
from omni_core.testing.sim_engine import NO_FAULTS, StepFaults
from omni_core.testing.sim_scheduler import LostForward, SchedulerConfig
from omni_core.testing.stalling_runtime import Stall, StallingRuntime
from omni_core.testing.workloads import WorkloadConfig, describe, run_workload, total_rows

SEEDS = range(36)
CRAMPED_SEEDS = range(8)
ROWS_OF_EACH_KIND = 2_000
REQUIRED_KINDS = (
    RowKind.STORED_HIT,
    RowKind.SAME_STEP_HIT,
    RowKind.RECYCLED_BLOCK,
    RowKind.HASHED_NEVER_COMPUTED,
    RowKind.PARTIAL_CHUNK,
    RowKind.LATE_MATERIALISE,
)


@pytest.mark.timeout(300)
def test_every_row_is_right_and_enough_rows_of_each_kind_were_judged(request, capsys):
    reports = [run_workload(seed) for seed in SEEDS]
    with capsys.disabled():
        request.config.pluginmanager.get_plugin("terminalreporter").write(f"\n{describe(reports)}\n")
    rows = total_rows(reports)
    assert {kind: rows[kind] for kind in REQUIRED_KINDS if rows[kind] < ROWS_OF_EACH_KIND} == {}
    # Kinds no figure is required for, but which must not silently vanish from the mix.
    assert all(rows[kind] > 0 for kind in RowKind)


def test_rows_are_right_when_blocks_change_hands_under_outstanding_reads(request, capsys):
    stalls = {"prefetch.": Stall(0.6, 0.03), "committer.": Stall(0.1, 0.003)}
    reports = [
        run_workload(seed, WorkloadConfig.draw_cramped(seed), runtime=StallingRuntime(seed, stalls))
        for seed in CRAMPED_SEEDS
    ]
    with capsys.disabled():
        request.config.pluginmanager.get_plugin("terminalreporter").write(f"\n{describe(reports)}\n")
    assert sum(report.rows_rescued for report in reports) > 0
    assert total_rows(reports)[RowKind.LATE_AFTER_REUSE] > 0


@pytest.mark.parametrize("seed", [3, 4])
def test_a_workload_with_one_thread_replays_from_its_seed(seed):
    config = WorkloadConfig.draw(seed)
    config = replace(config, stage=replace(config.stage, threaded_builder=False))
    # How many rows are set aside depends on the cache's own threads.
    first, second = (replace(run_workload(seed, config), rows_rescued=0) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("staging_depth", [1, 4])
@pytest.mark.parametrize("threaded_builder", [False, True], ids=["inline", "thread"])
def test_rows_are_right_at_every_staging_depth_with_slow_copies(staging_depth, threaded_builder):
    config = WorkloadConfig.draw(11)
    stage = replace(
        config.stage,
        staging_depth=staging_depth,
        threaded_builder=threaded_builder,
        backend_options={"copy_latency_s": 0.001, "copy_parts": 3},
    )
    report = run_workload(11, replace(config, stage=stage, num_requests=20, max_steps_late=staging_depth - 1))
    assert report.rows_delivered > 0


# -- small workloads, shrunk by hypothesis to the shortest that fails --------------------------------------------------

KEYS = (FakeKey("codes", (3,), torch.int64), FakeKey("layers.1", (2, 2), torch.bfloat16, padded=False))
STAGE = StageConfig(
    SchedulerConfig(num_blocks=9, block_size=2, max_num_tokens=7, max_num_requests=3),
    staging_depth=3,
    capture_sizes=(4, 8),
    shuffle_batch_seed=0,
    leftovers=True,
)
PREFIXES = ((1, 2, 3, 4), (1, 2, 5, 6), (7, 8))

submissions = st.tuples(
    st.just("submit"),
    st.sampled_from(PREFIXES),
    st.lists(st.integers(1, 3), max_size=4).map(tuple),
    st.integers(1, 4),
)
steps = st.tuples(
    st.just("step"),
    st.sets(st.sampled_from([key.name for key in KEYS])).map(frozenset),
    st.sampled_from(["none", "none", "none", "none", "abort first", "abort last", "lost", "retried"]),
)
aborts = st.tuples(st.just("abort"), st.integers(0, 9))
builds = st.tuples(st.sampled_from(["build", "build", "build half", "discard"]), st.integers(0, 2))


def fault_of(name):
    def decide(schedule):
        if not schedule.runs or name == "none":
            return NO_FAULTS
        if name == "lost":
            return StepFaults(lost_forward=LostForward.ABORTED)
        if name == "retried":
            return StepFaults(lost_forward=LostForward.RETRIED)
        run = schedule.runs[0 if name == "abort first" else -1]
        return StepFaults(abort_before_forward=frozenset({run.req_id}))

    return decide


def consume(stage, how, index):
    if not stage.unconsumed:
        return
    step = stage.unconsumed[index % len(stage.unconsumed)]
    if how == "discard":
        stage.discard(step)
    elif how == "build half":
        stage.build(step, step.req_ids[: len(step.req_ids) // 2])
    else:
        stage.build(step)


def play(stage, actions):
    num_requests = 0
    for action, *details in actions:
        note(f"{action} {details}")
        if action == "submit":
            prefix, suffix, max_output_tokens = details
            stage.submit(SimRequest(f"r{num_requests}", prefix + suffix, max_output_tokens))
            num_requests += 1
        elif action == "step":
            if len(stage.unconsumed) == STAGE.staging_depth:
                consume(stage, "build", 0)
            emitted, fault = details
            stage.step(emitted=emitted, faults=fault_of(fault))
        elif action == "abort":
            stage.abort(f"r{details[0]}")
        else:
            consume(stage, action, details[0])
            stage.collect()
    stage.run_to_end()


@settings(max_examples=100)
@given(st.lists(st.one_of(submissions, submissions, steps, steps, steps, builds, builds, aborts), max_size=24))
def test_rows_are_right_in_small_workloads(actions):
    with SimStage(STAGE, FakeModel(hidden_key(4, torch.bfloat16), KEYS)) as stage:
        play(stage, actions)
