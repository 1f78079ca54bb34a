# SPDX-License-Identifier: Apache-2.0
"""The simulated engine on vLLM 0.32's own scheduler and KV-cache manager: no model, no forward, every row judged.

Each test of a fact names where vLLM has it; a new vLLM that changes the fact fails here, not in somebody's rows.
"""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from real_scheduler import BLOCK, RealStage, events_of, import_simulation, prompt, run_of

from omni_core.prefix_cache.events import RequestEventKind, StepEvents
from omni_core.testing.row_judge import OracleViolationError
from omni_core.testing.row_kinds import RowKind
from omni_core.testing.scheduler_config import Mishaps, Preemption
from omni_core.testing.seeded_runtime import SeededRuntime
from omni_core.testing.workload_report import total_rows

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default"), pytest.mark.timeout(300)]

STARTED, EXTENDED, RESUMED = RequestEventKind.STARTED, RequestEventKind.EXTENDED, RequestEventKind.RESUMED
FINISHED = RequestEventKind.FINISHED


@pytest.fixture(scope="module")
def simulation():
    return import_simulation()


# -- random workloads --------------------------------------------------------------------------------------------------


def run_workloads(simulation, seeds):
    """Reports, and how often each thing happened, of workloads whose every delivery was right."""
    reports, happened = [], Counter()
    for seed in seeds:
        report, counts = simulation.workload.VllmWorkload.draw(seed).run()
        reports.append(report)
        happened.update({happening.name: count for happening, count in counts.items()})
    return reports, happened


HAPPENS_SELDOM = {"ENDED_WHILE_PREEMPTED", "SESSION_GAVE_UP", "RAN_AFTER_END"}


def assert_happened(happened, at_least, *, but=()):
    seldom = {name for name, count in happened.items() if count < at_least} - set(but)
    assert not seldom, {name: happened[name] for name in sorted(seldom)}


def test_random_workloads_on_the_real_scheduler(simulation):
    reports, happened = run_workloads(simulation, range(20))
    rows = total_rows(reports)
    assert_happened(happened, 10, but=HAPPENS_SELDOM)
    assert sum(report.rows_delivered for report in reports) > 10_000
    for kind in (RowKind.STORED_HIT, RowKind.SAME_STEP_HIT, RowKind.RECOMPUTED, RowKind.CLIPPED, RowKind.RESUMED):
        assert rows[kind] > 50, kind
    assert rows[RowKind.COPIED_BLOCK] > 20


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_random_workloads_on_the_real_scheduler(simulation):
    reports, happened = run_workloads(simulation, range(1000, 1400))
    rows = total_rows(reports)
    assert_happened(happened, 20)
    # First-come scheduling tells the worker of every change of hands, and replaces no content.
    for kind in set(RowKind) - {RowKind.OTHER_CONTENT, RowKind.REPLACED}:
        assert rows[kind] > 400, kind


@pytest.mark.parametrize("seed", [2, 5, 9, 11])
def test_workloads_under_an_explored_schedule(simulation, seed):
    workload = simulation.workload.VllmWorkload.draw(seed)
    stage = replace(workload.config.stage, backend_options={"copy_parts": 2}, threaded_builder=True)
    workload = replace(workload, config=replace(workload.config, stage=stage))
    with SeededRuntime(seed, stall_limit_s=5) as runtime:
        report, _ = workload.run(runtime)
    assert report.rows_delivered > 0


# -- preemption (v1/core/sched/scheduler.py: _preempt_request, _make_cached_request_data) ------------------------------


def crowded(simulation, outputs=9, **limits):
    """Two requests of 4 blocks in a pool of 7: the second is preempted when both want their fourth."""
    stage = RealStage(simulation, num_blocks=8, **limits)
    stage.submit("first", prompt(2 * BLOCK), outputs=outputs)
    stage.submit("second", prompt(2 * BLOCK, first=200), outputs=outputs)
    return stage


def test_a_preempted_request_comes_back_as_resumed_with_its_whole_new_table(simulation):
    with crowded(simulation) as stage:
        schedules = stage.run_to_end()
    (resumed,) = [schedule for schedule in schedules if events_of(schedule, RESUMED)]
    event, run = events_of(resumed, RESUMED)["second"], run_of(resumed, "second")
    assert event.block_ids == run.block_ids
    assert event.num_computed_tokens == run.start == 3 * BLOCK, "all of its full blocks are found again"
    assert event.num_known_tokens == 3 * BLOCK + 1, "what was computed, and one token sampled after it"
    assert event.num_scheduled_tokens == run.num_tokens == 1


def test_for_the_second_model_runner_it_comes_back_as_new(simulation):
    with crowded(simulation, preemption=Preemption.RECOMPUTE_V2) as stage:
        schedules = stage.run_to_end()
    assert not any(events_of(schedule, RESUMED) for schedule in schedules)
    first, again = [events["second"] for s in schedules if "second" in (events := events_of(s, STARTED))]
    assert (first.num_computed_tokens, first.num_known_tokens) == (0, 1)
    assert (again.num_computed_tokens, again.num_known_tokens) == (3 * BLOCK, 3 * BLOCK + 1)


def test_a_preempted_request_may_end_when_its_blocks_are_long_another_ones(simulation):
    with crowded(simulation, outputs=13) as stage:
        while "second" in stage.driver.running or not stage.schedules:
            stage.step()
        held = set(run_of(stage.schedules[-2], "second").block_ids)
        while not held & set(run_of(stage.schedules[-1], "first").block_ids):
            stage.step()
        assert stage.stage.abort("second")
        assert "second" in events_of(stage.step(), FINISHED)
        stage.run_to_end()


def test_a_reset_of_the_prefix_cache_preempts_all_and_they_compute_everything_again(simulation):
    with RealStage(simulation, preemption=Preemption.RECOMPUTE_V1, mishaps=Mishaps(seed=1, preempted=0.3)) as stage:
        stage.submit("a", prompt(9), outputs=20)
        schedules = stage.run_to_end()
    entries = [event for schedule in schedules for event in events_of(schedule, RESUMED).values()]
    assert len(entries) >= 2
    assert {event.num_computed_tokens for event in entries} == {0}
    assert all(event.num_known_tokens == event.num_scheduled_tokens for event in entries)


# -- hits (v1/core/kv_cache_manager.py: allocate_slots publishes the hash when the block is allocated) -----------------


def test_a_request_hits_blocks_that_another_computes_in_the_same_step(simulation):
    with RealStage(simulation) as stage:
        stage.submit("a", prompt(10))
        stage.submit("b", prompt(10))
        schedule = stage.step()
        assert [run.start for run in schedule.runs] == [0, 2 * BLOCK]
        stage.run_to_end()
        assert stage.stage.oracle.counts[RowKind.SAME_STEP_HIT] == 2 * BLOCK


def test_blocks_whose_forward_never_ran_are_hit_and_the_request_is_refused(simulation):
    with RealStage(simulation) as stage:
        stage.submit("a", prompt(10))
        stage.step(abort_before_forward=["a"])
        stage.submit("b", prompt(10))
        assert run_of(stage.step(), "b").start == 2 * BLOCK
        stage.run_to_end()
        assert stage.stage.oracle.requests_failed == 1


def test_at_least_the_last_token_of_a_prompt_is_computed(simulation):
    with RealStage(simulation) as stage:
        for req_id in ("a", "b"):
            stage.submit(req_id, prompt(2 * BLOCK))
            stage.step()
        assert run_of(stage.schedules[-1], "b").start == BLOCK
        stage.run_to_end()


def test_salt_and_image_are_part_of_a_blocks_identity(simulation):
    from omni_core.testing.sim_request import ImageSpan

    tokens = (1, *[9] * 7, 2)
    with RealStage(simulation) as stage:
        for req_id, salt, image in (("a", "", "cat"), ("b", "", "dog"), ("c", "x", "cat"), ("d", "", "cat")):
            stage.submit(req_id, tokens, images=(ImageSpan(1, 7, image),), salt=salt)
            stage.step()
        hits = {run.req_id: run.start for schedule in stage.schedules for run in schedule.runs}
        assert hits == {"a": 0, "b": 0, "c": 0, "d": 2 * BLOCK}
        stage.run_to_end()


def test_blocks_of_a_request_may_be_given_away_by_the_output_that_reports_its_end(simulation):
    with RealStage(simulation, num_blocks=4) as stage:
        stage.submit("a", prompt(3 * BLOCK - 1))
        ended = run_of(stage.step(), "a")
        stage.submit("b", prompt(3 * BLOCK - 1, first=200))
        schedule = stage.step()
        assert "a" in events_of(schedule, FINISHED)
        assert set(events_of(schedule, STARTED)["b"].block_ids) == set(ended.block_ids)
        stage.run_to_end()


# -- chunks and table width (v1/kv_cache_interface.py: max_num_blocks_per_req; v1/worker/block_table.py: append_row) ---


def test_a_long_prompt_is_cut_and_only_the_threshold_spares_a_lone_request(simulation):
    with RealStage(simulation, max_chunk_tokens=6, max_num_tokens=16) as stage:
        stage.submit("alone", prompt(20))
        assert run_of(stage.step(), "alone").num_tokens == 16
        stage.submit("other", prompt(20, first=200))
        schedule = stage.step()
        assert [run.num_tokens for run in schedule.runs] == [4, 6]
        assert not run_of(schedule, "other").samples
        stage.run_to_end()


@pytest.mark.parametrize("lookahead", [0, 3])
def test_no_table_grows_beyond_what_the_longest_request_needs(simulation, lookahead):
    """The scheduler computes nothing at or beyond `max_model_len - 1`, drafts and their lookahead slots included."""
    length = 4 * BLOCK
    shape = {"max_model_len": length, "lookahead_tokens": lookahead}
    with RealStage(simulation, max_draft_tokens=3, drafts=[(3, 0)] * 9, shape=shape) as stage:
        stage.submit("a", prompt(length - 6), outputs=6)
        schedules = stage.run_to_end()
    runs = [run for schedule in schedules for run in schedule.runs]
    assert max(run.stop for run in runs) <= length - 1
    assert max(len(run.block_ids) for run in runs) == length // BLOCK


# -- drafts (v1/core/sched/scheduler.py: schedule, update_from_output, update_draft_token_ids) -------------------------


@pytest.mark.parametrize("right", [0, 1, 3])
def test_rejected_drafts_are_scheduled_again(simulation, right):
    with RealStage(simulation, max_draft_tokens=3, drafts=[(right, 3 - right)]) as stage:
        stage.submit("a", prompt(5), outputs=8)
        stage.step()
        drafted = run_of(stage.step(), "a")
        assert (drafted.start, drafted.stop, len(drafted.drafts)) == (5, 9, 3)
        assert run_of(stage.step(), "a").start == 5 + 1 + right
        stage.run_to_end()
        assert stage.stage.oracle.counts[RowKind.CLIPPED] == 3 - right


def test_a_request_with_one_token_to_compute_may_start_with_placeholder_drafts(simulation):
    with RealStage(simulation, max_draft_tokens=3) as stage:
        stage.submit("a", prompt(2 * BLOCK + 1), outputs=4)
        stage.step()
        stage.submit("b", prompt(2 * BLOCK + 1))
        schedule = stage.step()
        assert events_of(schedule, STARTED)["b"].num_scheduled_tokens == 4
        assert run_of(schedule, "b").drafts == (-1, -1, -1)
        stage.run_to_end()


def test_drafts_guessed_at_the_end_of_a_part_of_a_prompt_come_with_the_end_of_the_next(simulation):
    """Then the run has known tokens before the one that is sampled from: their rows are valid whatever is accepted."""
    mishaps = Mishaps(seed=1, piece_delay=0)
    with RealStage(
        simulation, max_draft_tokens=2, max_chunk_tokens=6, drafts=[(0, 0), (0, 2)], mishaps=mishaps
    ) as stage:
        stage.submit("other", prompt(3, first=300), outputs=12)  # a lone request is not cut
        stage.submit("a", prompt(5), later_pieces=(prompt(9, first=200),))
        schedules = stage.run_to_end()
    mixed = [run for schedule in schedules for run in schedule.runs if run.req_id == "a" and run.drafts]
    assert [(run.num_tokens, len(run.drafts)) for run in mixed] == [(5, 2)]


# -- prompts in pieces (v1/core/sched/scheduler.py: _update_request_as_session) ----------------------------------------


def test_each_part_of_a_prompt_is_announced_as_new_with_the_table_kept(simulation):
    mishaps = Mishaps(seed=1, piece_delay=0)
    with RealStage(simulation, mishaps=mishaps) as stage:
        stage.submit("a", prompt(6), outputs=3, later_pieces=(prompt(5, first=200), prompt(4, first=300)))
        schedules = stage.run_to_end()
    events = [events["a"] for schedule in schedules if (events := events_of(schedule, STARTED))]
    assert [event.num_computed_tokens for event in events] == [0, 6, 11]
    assert [event.num_known_tokens for event in events] == [1, 7, 12]
    for earlier, later in pairwise(events):
        assert later.block_ids[: len(earlier.block_ids)] == earlier.block_ids


# -- several KV groups (v1/core/kv_cache_coordinator.py, v1/core/single_type_kv_cache_manager.py) ----------------------


@pytest.mark.parametrize(("groups", "mirrored"), [("FULL_THEN_SLIDING", 0), ("SLIDING_THEN_FULL", 2)])
def test_the_full_attention_group_is_found_and_its_hits_name_every_block(simulation, groups, mirrored):
    from omni_core.integrations.vllm.simulation.engine_config import build_scheduler

    shape = {"kv_groups": simulation.shape.KvGroups[groups]}
    with RealStage(simulation, side_group_window=BLOCK, shape=shape) as stage:
        assert build_scheduler(stage.driver.config, stage.driver.shape).mirrored_group == mirrored
        for req_id in ("a", "b"):
            stage.submit(req_id, prompt(5 * BLOCK), outputs=6)
            stage.run_to_end()
        tables = [run.block_ids for schedule in stage.schedules for run in schedule.runs]
        assert run_of([s for s in stage.schedules if events_of(s, STARTED)][-1], "b").start == 4 * BLOCK
    assert all(0 not in table for table in tables), "a null block has no rows"


def test_a_hit_ends_inside_a_block_and_that_block_is_copied(simulation):
    """Only beside mamba groups in align mode, whose `prefix_match_unit` is smaller than the block."""
    shape = {"kv_groups": simulation.shape.KvGroups.MAMBA_THEN_FULL, "match_unit": 2}
    with RealStage(simulation, partial_block_hits=True, shape=shape) as stage:
        for req_id in ("a", "b"):
            stage.submit(req_id, prompt(BLOCK + 3))
            stage.run_to_end()
        schedule = [s for s in stage.schedules if events_of(s, STARTED)][-1]
        run = run_of(schedule, "b")
        assert run.start == BLOCK + 2
        copied = {copy.destination_block_id for copy in schedule.events.block_copies}
        assert run.block_ids[1] in copied
        assert stage.stage.oracle.counts[RowKind.COPIED_BLOCK] == 2


# -- scheduling ahead (v1/core/sched/async_scheduler.py) ---------------------------------------------------------------


def test_a_step_scheduled_ahead_may_compute_a_request_that_has_ended(simulation):
    """All drafts of a step were accepted, which its successor could not know. Its row belongs to the request still."""
    shape = {"async_scheduling": True}
    with RealStage(simulation, max_draft_tokens=3, drafts=[(3, 0)] * 9, shape=shape) as stage:
        stage.submit("a", prompt(5), outputs=7)
        schedules = stage.run_to_end()
    last = run_of([schedule for schedule in schedules if schedule.runs][-1], "a")
    assert last.start > 5 + 7 - 1
    assert "a" in events_of(schedules[-1], FINISHED)


def test_a_request_preempted_with_tokens_in_flight_comes_back_when_they_are_known(simulation):
    with crowded(simulation, shape={"async_scheduling": True}) as stage:
        schedules = stage.run_to_end()
    (resumed,) = [events["second"] for s in schedules if "second" in (events := events_of(s, RESUMED))]
    computed = max(run.stop for s in schedules for run in s.runs if run.req_id == "second" and len(s.runs) == 2)
    assert resumed.num_known_tokens == computed + 1


# -- priorities (v1/core/sched/scheduler.py, schedule: the victim may be one it has scheduled already) -----------------


class WithoutDigests:
    """A cache that is not told what lies in its blocks."""

    def __init__(self, cache):
        self._cache = cache

    def __getattr__(self, name):
        return getattr(self._cache, name)

    def new_step_starts(self, events):
        requests = tuple(replace(event, block_digests=()) for event in events.requests)
        self._cache.new_step_starts(StepEvents(requests, events.block_copies))


def taken_back(simulation, **stage):
    """`low` is given two blocks that hold rows of `old`, hashed, and preempted before the schedule is out."""
    stage = RealStage(
        simulation,
        num_blocks=10,
        max_num_tokens=16,
        max_chunk_tokens=8,
        block_digests=True,
        preemption=Preemption.RECOMPUTE_V1,
        mishaps=Mishaps(taken_back=0.1),
        priorities={"old": 1, "low": 1, "high": 0},
        **stage,
    )
    stage.submit("old", prompt(20))
    while stage.driver.has_news:
        stage.step()
    stage.submit("low", prompt(33, first=200))
    stage.step()
    stage.submit("high", prompt(4, first=300), outputs=3)
    return stage


def test_by_priority_a_tenancy_may_be_hidden_and_its_digest_shows_that_its_rows_are_anothers(simulation):
    with taken_back(simulation) as stage:
        schedules = stage.run_to_end()
        runs = [run for schedule in schedules for run in schedule.runs if run.req_id == "low"]
        (resumed,) = [events["low"] for s in schedules if "low" in (events := events_of(s, RESUMED))]
        assert (runs[1].stop, resumed.num_computed_tokens) == (24, 28), "the output said nothing of [24, 28)"
        assert stage.stage.oracle.requests_failed == 1
        assert stage.stage.oracle.counts[RowKind.OTHER_CONTENT] == 4


def test_without_digests_a_hidden_tenancy_would_deliver_rows_of_another_request(simulation):
    """Why the gate refuses priorities to a worker that is told no digests."""
    with (
        taken_back(simulation, wrap_cache=WithoutDigests) as stage,
        pytest.raises(OracleViolationError, match="yet it was served"),
    ):
        stage.run_to_end()
