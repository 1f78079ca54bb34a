# SPDX-License-Identifier: Apache-2.0
"""The simulated scheduler: blocks, hits, preemption, pieces, replacement and drafts behave as vLLM's do."""

from dataclasses import replace

import pytest

from omni_core.prefix_cache.events import RequestEventKind
from omni_core.testing import ImageSpan, Mishaps, Preemption, SchedulerConfig, SimRequest
from omni_core.testing.sim_allocator import extend_hashed_blocks
from omni_core.testing.sim_request import TokenTrack
from omni_core.testing.sim_scheduler import SimScheduler

GEOMETRY = SchedulerConfig(num_blocks=8, block_size=4, max_num_tokens=64)
PREEMPTING = replace(GEOMETRY, preemption=Preemption.RECOMPUTE_V1)
PROMPT = tuple(range(1, 13))


def next_token(track):
    return 100 + len(track.token_ids)


def run_steps(scheduler, count=1):
    schedules = []
    for _ in range(count):
        schedules.append(scheduler.schedule())
        scheduler.complete(
            schedules[-1], {run.req_id: (next_token(run.track),) for run in schedules[-1].runs if run.samples}
        )
    return schedules


def events_of(schedule, kind):
    return {event.req_id: event for event in schedule.events.requests if event.kind is kind}


def started(schedule):
    return events_of(schedule, RequestEventKind.STARTED)


def spans(schedule):
    return {run.req_id: (run.start, run.stop) for run in schedule.runs}


def digests_of(tokens, block_size=4):
    hashed = []
    extend_hashed_blocks(hashed, TokenTrack(SimRequest("any", tokens)), block_size)
    return tuple(block.digest for block in hashed)


def test_the_null_block_is_never_handed_out():
    scheduler = SimScheduler(GEOMETRY)
    scheduler.add(SimRequest("a", tuple(range(28))))
    (schedule,) = run_steps(scheduler)
    assert started(schedule)["a"].block_ids == (1, 2, 3, 4, 5, 6, 7)


def test_a_hit_covers_whole_blocks_and_never_the_last_prompt_token():
    scheduler = SimScheduler(GEOMETRY)
    scheduler.add(SimRequest("a", PROMPT))
    run_steps(scheduler)
    for req_id, prompt, hit in (("same", PROMPT, 8), ("longer", (*PROMPT, 99), 12), ("shorter", PROMPT[:6], 4)):
        scheduler.add(SimRequest(req_id, prompt))
        (schedule,) = run_steps(scheduler)
        assert started(schedule)[req_id].num_computed_tokens == hit
        assert started(schedule)[req_id].block_ids[: hit // 4] == (1, 2, 3)[: hit // 4]


def test_hashes_are_published_at_allocation_so_a_request_of_the_same_step_hits():
    scheduler = SimScheduler(GEOMETRY)
    scheduler.add(SimRequest("a", PROMPT))
    scheduler.add(SimRequest("b", PROMPT))
    schedule = scheduler.schedule()
    assert started(schedule)["b"].num_computed_tokens == 8
    assert started(schedule)["b"].block_ids[:2] == started(schedule)["a"].block_ids[:2]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (SimRequest("a", PROMPT, salt="x"), SimRequest("b", PROMPT, salt="y")),
        (
            SimRequest("a", (9,) * 12, images=(ImageSpan(0, 6, "cat"),)),
            SimRequest("b", (9,) * 12, images=(ImageSpan(0, 6, "dog"),)),
        ),
    ],
    ids=["salt", "image"],
)
def test_equal_tokens_of_another_identity_share_no_block(first, second):
    scheduler = SimScheduler(GEOMETRY)
    scheduler.add(first)
    scheduler.add(second)
    assert started(scheduler.schedule())["b"].num_computed_tokens == 0


def test_freed_blocks_are_reused_tail_first_and_unhashed_ones_before_all():
    scheduler = SimScheduler(GEOMETRY)
    scheduler.add(SimRequest("a", tuple(range(10))))  # blocks 1, 2 full, 3 half full
    run_steps(scheduler)
    assert scheduler.allocator.free_queue() == (3, 4, 5, 6, 7, 2, 1)


def test_a_reused_block_is_no_longer_found():
    scheduler = SimScheduler(replace(GEOMETRY, num_blocks=4))
    scheduler.add(SimRequest("a", PROMPT))
    run_steps(scheduler)
    scheduler.add(SimRequest("b", (50, 51, 52, 53)))  # takes block 3, the tail of a
    run_steps(scheduler)
    scheduler.add(SimRequest("c", (*PROMPT[:8], 77)))
    (schedule,) = run_steps(scheduler)
    assert started(schedule)["c"].num_computed_tokens == 8
    scheduler.add(SimRequest("d", (*PROMPT, 77, 78, 79, 80)[:12]))
    assert started(scheduler.schedule())["d"].num_computed_tokens == 8


def test_long_prompts_are_cut_to_the_budget_and_to_the_chunk_limit():
    scheduler = SimScheduler(replace(GEOMETRY, max_num_tokens=6, max_chunk_tokens=5))
    scheduler.add(SimRequest("a", PROMPT))
    scheduler.add(SimRequest("b", (40, 41, 42)))
    runs = [[(run.req_id, run.start, run.stop) for run in schedule.runs] for schedule in run_steps(scheduler, 3)]
    assert runs == [[("a", 0, 5), ("b", 0, 1)], [("a", 5, 10), ("b", 1, 2)], [("a", 10, 12), ("b", 2, 3)]]


def test_a_finished_request_has_prompt_plus_outputs_minus_one_rows():
    scheduler = SimScheduler(GEOMETRY)
    scheduler.add(SimRequest("a", PROMPT[:3], max_output_tokens=4))
    schedules = run_steps(scheduler, 5)
    assert [(run.start, run.stop) for schedule in schedules for run in schedule.runs] == [
        (0, 3),
        (3, 4),
        (4, 5),
        (5, 6),
    ]
    assert [set(events_of(schedule, RequestEventKind.EXTENDED)) for schedule in schedules[:4]] == [
        set(),
        set(),
        {"a"},
        set(),
    ]
    assert set(events_of(schedules[4], RequestEventKind.FINISHED)) == {"a"}


def test_blocks_of_a_finished_request_can_be_handed_out_in_the_step_that_reports_it():
    scheduler = SimScheduler(replace(GEOMETRY, num_blocks=4))
    scheduler.add(SimRequest("a", PROMPT))
    scheduler.add(SimRequest("b", tuple(range(50, 62))))
    _, schedule = run_steps(scheduler, 2)
    assert set(events_of(schedule, RequestEventKind.FINISHED)) == {"a"}
    assert set(started(schedule)["b"].block_ids) == {1, 2, 3}


@pytest.mark.parametrize("steps_before", [0, 1, 4], ids=["waiting", "mid-prefill", "decoding"])
def test_an_abort_frees_blocks_at_once_and_is_reported_with_the_next_step(steps_before):
    scheduler = SimScheduler(replace(GEOMETRY, max_chunk_tokens=5))
    scheduler.add(SimRequest("a", PROMPT, max_output_tokens=9))
    run_steps(scheduler, steps_before)
    assert scheduler.abort("a")
    assert scheduler.allocator.num_free_blocks == 7
    schedule = scheduler.schedule()
    assert set(events_of(schedule, RequestEventKind.ABORTED)) == {"a"}
    assert schedule.runs == ()
    assert not scheduler.abort("a")


def test_admission_waits_rather_than_preempts():
    scheduler = SimScheduler(GEOMETRY)  # 7 blocks to give
    scheduler.add(SimRequest("a", PROMPT[:4], max_output_tokens=13))  # will need 4
    scheduler.add(SimRequest("b", tuple(range(50, 64))))  # needs 4
    assert [run.req_id for run in scheduler.schedule().runs] == ["a"]


def test_a_request_that_can_never_be_admitted_is_refused_with_the_numbers():
    with pytest.raises(ValueError, match="needs 8 blocks; num_blocks=8 has 7"):
        SimScheduler(GEOMETRY).add(SimRequest("a", tuple(range(29))))


def test_a_hit_inside_a_block_copies_that_block():
    scheduler = SimScheduler(replace(GEOMETRY, partial_block_hits=True))
    scheduler.add(SimRequest("a", PROMPT))
    run_steps(scheduler)
    scheduler.add(SimRequest("b", (*PROMPT[:6], 70, 71, 72)))
    schedule = scheduler.schedule()
    event = started(schedule)["b"]
    (copy,) = schedule.events.block_copies
    assert event.num_computed_tokens == 6
    assert (copy.source_block_id, copy.destination_block_id) == (2, event.block_ids[1])
    assert copy.destination_block_id != 2


# -- preemption --------------------------------------------------------------------------------------------------------


def test_the_last_running_request_is_preempted_when_no_block_is_free():
    scheduler = SimScheduler(replace(PREEMPTING, num_blocks=5))  # 4 blocks to give
    scheduler.add(SimRequest("a", (1, 2, 3, 4), max_output_tokens=9))
    scheduler.add(SimRequest("b", (5, 6, 7, 8), max_output_tokens=9))
    schedules = run_steps(scheduler, 6)
    assert [set(spans(schedule)) for schedule in schedules] == [{"a", "b"}] * 5 + [{"a"}]
    assert scheduler.waiting == ("b",)
    assert scheduler.running == ("a",)


@pytest.mark.parametrize(
    ("form", "kind"),
    [
        (Preemption.RECOMPUTE_V1, RequestEventKind.RESUMED),
        (Preemption.RECOMPUTE_V2, RequestEventKind.STARTED),
    ],
)
def test_a_preempted_request_comes_back_with_a_fresh_hit_over_prompt_and_output(form, kind):
    scheduler = SimScheduler(replace(PREEMPTING, preemption=form))
    scheduler.add(SimRequest("a", (1, 2, 3, 4, 5, 6), max_output_tokens=9))
    run_steps(scheduler, 4)  # 9 rows: two full blocks and one more
    assert scheduler.preempt("a")
    schedule = scheduler.schedule()
    event = events_of(schedule, kind)["a"]
    assert event.num_computed_tokens == 8
    assert event.num_known_tokens == 10
    assert len(event.block_ids) == 3
    assert spans(schedule) == {"a": (8, 10)}


def test_a_hit_after_preemption_is_longer_if_another_request_went_further():
    scheduler = SimScheduler(replace(PREEMPTING, num_blocks=9, max_chunk_tokens=4, max_num_requests=2))
    scheduler.add(SimRequest("a", (*PROMPT, 50)))
    scheduler.add(SimRequest("b", (*PROMPT, 60)))
    run_steps(scheduler)
    scheduler.preempt("b", hold=2)
    run_steps(scheduler, 2)
    assert events_of(scheduler.schedule(), RequestEventKind.RESUMED)["b"].num_computed_tokens == 12


def test_preemption_is_refused_where_it_never_happens():
    scheduler = SimScheduler(GEOMETRY)
    scheduler.add(SimRequest("a", PROMPT))
    scheduler.schedule()
    assert not scheduler.preempt("a")
    with pytest.raises(ValueError, match="needs a preemption"):
        replace(GEOMETRY, mishaps=Mishaps(preempted=0.5))


# -- prompts in pieces -------------------------------------------------------------------------------------------------


def test_the_next_piece_of_a_prompt_re_enters_as_started_with_its_own_table():
    scheduler = SimScheduler(replace(GEOMETRY, mishaps=Mishaps(piece_delay=0)))
    scheduler.add(SimRequest("a", (1, 2, 3, 4, 5, 6), later_pieces=((7, 8, 9),), max_output_tokens=2))
    first, second, third = run_steps(scheduler, 3)
    assert started(first)["a"].block_ids == (1, 2)
    assert not first.runs[0].samples
    assert started(second)["a"].block_ids == (1, 2, 3)
    assert started(second)["a"].num_computed_tokens == 6
    assert [spans(schedule) for schedule in (first, second, third)] == [{"a": (0, 6)}, {"a": (6, 9)}, {"a": (9, 10)}]
    assert third.events.requests == ()


def test_a_request_that_waits_for_a_piece_keeps_its_blocks_unless_nothing_else_can_run():
    scheduler = SimScheduler(replace(PREEMPTING, num_blocks=5, mishaps=Mishaps(piece_delay=1)))
    scheduler.add(SimRequest("a", (1, 2, 3, 4, 5), later_pieces=((6, 7),)))  # holds 2 of 4 blocks while it waits
    run_steps(scheduler)
    scheduler.add(SimRequest("b", tuple(range(50, 63))))  # needs all 4
    runs = [spans(schedule) for schedule in run_steps(scheduler, 6)]
    assert {"b": (0, 13)} in runs
    assert scheduler.running == scheduler.waiting == ()


# -- replaced contents -------------------------------------------------------------------------------------------------


def test_a_replaced_request_keeps_the_prefix_that_both_contents_share():
    scheduler = SimScheduler(GEOMETRY)
    scheduler.add(SimRequest("a", PROMPT, max_output_tokens=9))
    run_steps(scheduler, 2)
    assert scheduler.replace(SimRequest("a", (*PROMPT[:6], 77, 78, 79)))
    schedule = scheduler.schedule()
    event = events_of(schedule, RequestEventKind.REPLACED)["a"]
    assert event.block_ids[:2] == (1, 2)
    assert event.num_computed_tokens == 6
    assert spans(schedule) == {"a": (6, 9)}


def test_of_a_replaced_request_something_is_always_left_to_compute():
    scheduler = SimScheduler(GEOMETRY)
    scheduler.add(SimRequest("a", PROMPT, max_output_tokens=9))
    run_steps(scheduler, 2)
    scheduler.replace(SimRequest("a", PROMPT))
    assert spans(scheduler.schedule()) == {"a": (11, 12)}


def test_a_block_that_another_request_holds_is_not_kept_in_part():
    scheduler = SimScheduler(replace(GEOMETRY, num_blocks=12))
    for req_id in ("a", "b"):
        scheduler.add(SimRequest(req_id, PROMPT, max_output_tokens=9))
    run_steps(scheduler)
    scheduler.replace(SimRequest("a", (*PROMPT[:6], 77)))
    event = events_of(scheduler.schedule(), RequestEventKind.REPLACED)["a"]
    assert event.num_computed_tokens == 4
    assert event.block_ids[0] == 1
    assert event.block_ids[1] != 2


def test_only_the_last_content_of_a_request_that_was_never_scheduled_exists():
    scheduler = SimScheduler(GEOMETRY)
    scheduler.add(SimRequest("a", PROMPT))
    scheduler.replace(SimRequest("a", (50, 51)))
    scheduler.replace(SimRequest("a", (60, 61, 62)))
    (schedule,) = run_steps(scheduler)
    assert [event.kind for event in schedule.events.requests] == [RequestEventKind.REPLACED]
    assert schedule.runs[0].track.token_ids[:3] == [60, 61, 62]


def test_a_hash_of_replaced_content_can_still_be_found():
    found = []
    for seed in range(12):
        scheduler = SimScheduler(replace(GEOMETRY, num_blocks=12, mishaps=Mishaps(seed)))
        scheduler.add(SimRequest("a", PROMPT, max_output_tokens=5))
        run_steps(scheduler, 2)
        scheduler.replace(SimRequest("a", (*PROMPT[:6], 77, 78, 79), max_output_tokens=5))
        run_steps(scheduler)
        scheduler.add(SimRequest("b", PROMPT[:9]))
        found.append(started(scheduler.schedule())["b"].num_computed_tokens)
    assert set(found) == {4, 8}


# -- drafts ------------------------------------------------------------------------------------------------------------


def drafting(drafts):
    config = replace(GEOMETRY, max_draft_tokens=4)
    return SimScheduler(config, lambda track: drafts)


def test_accepted_drafts_move_a_request_on_and_rejected_ones_are_computed_again():
    scheduler = drafting((900, 901, 902))
    scheduler.add(SimRequest("a", PROMPT[:4], max_output_tokens=9))
    run_steps(scheduler)
    schedule = scheduler.schedule()
    (run,) = schedule.runs
    assert (run.start, run.stop, run.drafts) == (4, 8, (900, 901, 902))
    assert run.forward_track().token_ids == [*PROMPT[:4], 104, 900, 901, 902]
    scheduler.complete(schedule, {"a": (900, 950)})  # one of three was right
    assert spans(scheduler.schedule()) == {"a": (6, 10)}


@pytest.mark.parametrize(("sampled", "published"), [((999,), False), ((900, 901, 902, 903), True)])
def test_blocks_are_hashed_once_their_drafts_are_accepted(sampled, published):
    scheduler = drafting((900, 901, 902))
    scheduler.add(SimRequest("a", PROMPT[:4], max_output_tokens=9))
    run_steps(scheduler)
    schedule = scheduler.schedule()
    second_block = schedule.runs[0].block_ids[1]
    assert not scheduler.allocator.is_published(second_block)
    scheduler.complete(schedule, {"a": sampled})
    scheduler.schedule()
    assert scheduler.allocator.is_published(second_block) is published


def test_drafts_never_reach_beyond_what_a_request_may_compute():
    scheduler = drafting((900, 901, 902, 903))
    scheduler.add(SimRequest("a", PROMPT[:4], max_output_tokens=3))  # 6 rows in all
    run_steps(scheduler)
    assert spans(scheduler.schedule()) == {"a": (4, 6)}


# -- digests -----------------------------------------------------------------------------------------------------------


def test_events_tell_the_digest_of_each_full_block_and_of_blocks_filled_later():
    scheduler = SimScheduler(replace(GEOMETRY, block_digests=True))
    scheduler.add(SimRequest("a", PROMPT[:6], max_output_tokens=5))
    schedules = run_steps(scheduler, 4)
    known = digests_of((*PROMPT[:6], 106, 107))
    assert started(schedules[0])["a"].block_digests == (known[0], 0)
    assert [schedule.events.filled_blocks for schedule in schedules[:2]] == [(), ()]
    ((block_id, digest),) = [(block.block_id, block.digest) for block in schedules[2].events.filled_blocks]
    assert (block_id, digest) == (2, known[1])


def test_a_schedule_that_is_taken_back_is_never_told_and_its_hashes_can_be_found():
    config = replace(PREEMPTING, block_digests=True, mishaps=Mishaps(taken_back=1.0))
    scheduler = SimScheduler(config)
    scheduler.add(SimRequest("a", PROMPT))
    schedule = scheduler.schedule()
    assert schedule.runs == ()
    assert schedule.events.requests == ()
    assert scheduler.waiting == ("a",)
    assert [state.cached for state in scheduler.allocator.states()[1:4]] == [True, True, True]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_digests": False}, "needs block_digests"),
        ({"block_digests": True, "partial_block_hits": True}, "has no digest"),
    ],
)
def test_schedules_are_taken_back_only_where_the_cache_can_know(settings, message):
    with pytest.raises(ValueError, match=message):
        replace(PREEMPTING, mishaps=Mishaps(taken_back=0.1), **settings)


# -- geometry ----------------------------------------------------------------------------------------------------------


def test_blocks_of_a_side_group_come_from_the_same_pool_and_are_never_told():
    scheduler = SimScheduler(replace(GEOMETRY, num_blocks=16, side_group_window=4, max_chunk_tokens=4))
    scheduler.add(SimRequest("a", PROMPT))
    schedules = run_steps(scheduler, 3)
    told = schedules[2].runs[0].block_ids
    assert len(told) == 3
    assert told != (1, 2, 3)
    held = {state.block_id for state in scheduler.allocator.states() if state.references}
    assert held == set()


# -- ids used again ----------------------------------------------------------------------------------------------------


def test_one_step_reports_the_end_of_an_id_and_its_next_life():
    scheduler = SimScheduler(GEOMETRY)
    scheduler.add(SimRequest("a", PROMPT, max_output_tokens=9))
    run_steps(scheduler)
    scheduler.abort("a")
    scheduler.add(SimRequest("a", (50, 51, 52)))
    schedule = scheduler.schedule()
    assert [event.kind for event in schedule.events.requests] == [RequestEventKind.ABORTED, RequestEventKind.STARTED]
