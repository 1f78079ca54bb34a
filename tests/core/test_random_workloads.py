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

from omni_core.prefix_cache.config import Delivery
from omni_core.testing import (
    FakeKey,
    FakeModel,
    LostForward,
    Mishaps,
    Preemption,
    RowKind,
    SchedulerConfig,
    SimRequest,
    SimStage,
    StageConfig,
    WorkloadConfig,
    hidden_key,
    run_workload,
)
from omni_core.testing.seeded_runtime import SeededRuntime
from omni_core.testing.sim_step import NO_FAULTS, StepFaults
from omni_core.testing.stalling_runtime import Stall, StallingRuntime
from omni_core.testing.workload_report import describe, total_rows

SEEDS = range(44)
CRAMPED_SEEDS = range(8)
SCHEDULED_SEEDS = range(12)
ROWS_OF_EACH_KIND = 2_000
REQUIRED_KINDS = (
    RowKind.STORED_HIT,
    RowKind.SAME_STEP_HIT,
    RowKind.RECYCLED_BLOCK,
    RowKind.HASHED_NEVER_COMPUTED,
    RowKind.PARTIAL_CHUNK,
    RowKind.LATE_MATERIALISE,
    RowKind.DEFERRED,
)
"""Kinds of which a few dozen workloads hold thousands; of the others `omni-core fuzz` judges as many."""


@pytest.mark.timeout(300)
def test_every_row_is_right_and_enough_rows_of_each_kind_were_judged(request, capsys):
    reports = [run_workload(seed) for seed in SEEDS]
    with capsys.disabled():
        request.config.pluginmanager.get_plugin("terminalreporter").write(f"\n{describe(reports)}\n")
    rows = total_rows(reports)
    assert {kind: rows[kind] for kind in REQUIRED_KINDS if rows[kind] < ROWS_OF_EACH_KIND} == {}
    # Kinds no figure is required for, but which must not silently vanish from the mix.
    assert [kind for kind in RowKind if rows[kind] < 10] == []


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


@pytest.mark.parametrize("seed", SCHEDULED_SEEDS)
def test_rows_are_right_whatever_thread_goes_next(seed):
    config = WorkloadConfig.draw(1_000 + seed)
    stage = replace(config.stage, threaded_builder=True, backend_options={"copy_parts": 2})
    with SeededRuntime(seed, stall_limit_s=5) as runtime:
        report = run_workload(seed, replace(config, stage=stage, num_requests=12), runtime=runtime)
    assert report.num_requests >= 12


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
SCHEDULER = SchedulerConfig(
    num_blocks=12, block_size=2, max_num_tokens=7, max_num_requests=3, mishaps=Mishaps(piece_delay=1)
)
STAGE = StageConfig(SCHEDULER, staging_depth=3, capture_sizes=(4, 8), shuffle_batch_seed=0, leftovers=True)
LIVELY_SCHEDULER = replace(
    SCHEDULER, preemption=Preemption.RECOMPUTE_V1, block_digests=True, max_draft_tokens=2, partial_block_hits=True
)
LIVELY_STAGE = replace(STAGE, scheduler=LIVELY_SCHEDULER, deferred_keys=frozenset({"codes"}))
PREFIXES = ((1, 2, 3, 4), (1, 2, 5, 6), (7, 8))

few_tokens = st.lists(st.integers(1, 3), max_size=4).map(tuple)
prompts = st.tuples(st.sampled_from(PREFIXES), few_tokens).map(lambda parts: parts[0] + parts[1])
ids = st.integers(0, 5)
submissions = st.tuples(st.just("submit"), ids, prompts, few_tokens, st.integers(1, 4))
steps = st.tuples(
    st.just("step"),
    st.sets(st.sampled_from([key.name for key in KEYS])).map(frozenset),
    st.sampled_from(["none", "none", "none", "none", "abort first", "abort last", "lost", "retried"]),
)
aborts = st.tuples(st.just("abort"), ids)
builds = st.tuples(
    st.sampled_from(["build", "build", "build half", "build unacknowledged", "discard"]), st.integers(0, 2)
)
preemptions = st.tuples(st.just("preempt"), ids, st.integers(0, 2))
replacements = st.tuples(st.just("replace"), ids, prompts, st.integers(1, 4))
plain_actions = st.one_of(submissions, submissions, steps, steps, steps, builds, builds, aborts)
lively_actions = st.one_of(plain_actions, plain_actions, preemptions, replacements)


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
    stage.collect(acknowledged=lambda built: () if how == "build unacknowledged" else tuple(built.outputs))


def act(stage, action, details):
    scheduler = stage.engine.scheduler
    if action == "step":
        if len(stage.unconsumed) == stage.config.staging_depth:
            consume(stage, "build", 0)
        emitted, fault = details
        stage.step(emitted=emitted, faults=fault_of(fault))
        return
    if action not in ("submit", "abort", "preempt", "replace"):
        consume(stage, action, details[0])
        return
    number, *details = details
    req_id = f"r{number}"
    if action == "submit":
        prompt, piece, max_output_tokens = details
        if req_id not in (*scheduler.waiting, *scheduler.running):
            pieces = (piece,) if piece else ()
            stage.submit(SimRequest(req_id, prompt, max_output_tokens, later_pieces=pieces))
    elif action == "abort":
        stage.abort(req_id)
    elif action == "preempt":
        scheduler.preempt(req_id, hold=details[0])
    else:
        prompt, max_output_tokens = details
        scheduler.replace(SimRequest(req_id, prompt, max_output_tokens))


def play(config, actions):
    with SimStage(config, FakeModel(hidden_key(4, torch.bfloat16), KEYS)) as stage:
        for action, *details in actions:
            note(f"{action} {details}")
            act(stage, action, details)
        stage.run_to_end()


@settings(max_examples=settings().max_examples // 2)
@given(st.lists(plain_actions, max_size=24))
def test_rows_are_right_in_small_workloads(actions):
    play(STAGE, actions)


@settings(max_examples=settings().max_examples * 3 // 4)
@given(
    st.sampled_from([Preemption.RECOMPUTE_V1, Preemption.RECOMPUTE_V2]),
    st.booleans(),
    st.sampled_from(Delivery),
    st.sampled_from([0, 64, 4096]),
    st.integers(0, 3),
    st.lists(lively_actions, max_size=30),
)
def test_rows_are_right_in_small_workloads_with_every_life_cycle(
    preemption, block_digests, delivery, device_staging_bytes, seed, actions
):
    scheduler = replace(
        LIVELY_SCHEDULER, preemption=preemption, block_digests=block_digests, mishaps=Mishaps(seed, piece_delay=1)
    )
    play(
        replace(LIVELY_STAGE, scheduler=scheduler, delivery=delivery, device_staging_bytes=device_staging_bytes),
        actions,
    )
