# SPDX-License-Identifier: Apache-2.0
"""The simulator and its judge: blocks behave as vLLM's do, rows say where they belong, and a wrong cache is noticed."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from omni_core.prefix_cache.config import HIDDEN_KEY
from omni_core.prefix_cache.errors import HitRowsAbsentError
from omni_core.prefix_cache.events import RequestEventKind
from omni_core.testing import (
    FakeKey,
    FakeModel,
    ImageSpan,
    LostForward,
    OracleViolationError,
    PrefixDigester,
    RowKind,
    RowTap,
    SchedulerConfig,
    SimRequest,
    SimStage,
    StageConfig,
    WorkloadConfig,
    hidden_key,
    run_workload,
)
from omni_core.testing.fake_model import GARBAGE_BYTE, FakeRun
from omni_core.testing.reference_cache import ReferenceCache
from omni_core.testing.sim_engine import StepFaults
from omni_core.testing.sim_request import TokenTrack
from omni_core.testing.sim_scheduler import SimScheduler

GEOMETRY = SchedulerConfig(num_blocks=8, block_size=4, max_num_tokens=64)
PROMPT = tuple(range(1, 13))


def next_token(track):
    return 100 + len(track.token_ids)


def run_steps(scheduler, count=1):
    schedules = []
    for _ in range(count):
        schedules.append(scheduler.schedule())
        scheduler.complete(schedules[-1], next_token)
    return schedules


def events_of(schedule, kind):
    return {event.req_id: event for event in schedule.events.requests if event.kind is kind}


def started(schedule):
    return events_of(schedule, RequestEventKind.STARTED)


# -- blocks and scheduling ---------------------------------------------------------------------------------------------


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


# -- rows --------------------------------------------------------------------------------------------------------------

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_differ_by_prefix_position_and_key_and_are_never_zero(dtype):
    keys = (FakeKey("x", (2, 4), dtype), FakeKey("y", (2, 4), dtype))
    model = FakeModel(hidden_key(8), keys)
    positions = np.arange(12)
    tables = [
        model.rows(key, TokenTrack(SimRequest("r", prompt)), positions).reshape(12, -1)
        for prompt in (PROMPT, (2, *PROMPT[1:]))
        for key in keys
    ]
    rows = torch.cat(tables)
    assert rows.dtype == dtype
    assert len({tuple(row) for row in rows.tolist()}) == len(rows)
    assert torch.isfinite(rows.double()).all()
    assert (rows != 0).all()


def test_equal_prefixes_give_equal_rows_and_later_tokens_do_not_matter():
    model = FakeModel(hidden_key(8))
    one, other = (TokenTrack(SimRequest("r", prompt)) for prompt in (PROMPT, (*PROMPT[:7], 99, 98)))
    rows = [model.rows(model.hidden, track, np.arange(9)) for track in (one, other)]
    assert torch.equal(rows[0][:7], rows[1][:7])
    assert not torch.equal(rows[0][7], rows[1][7])


def test_a_forward_puts_real_rows_first_and_garbage_behind_and_pads_only_padded_keys():
    model = FakeModel(hidden_key(2), (FakeKey("codes.audio", (3,), torch.int64, padded=False),))
    track = TokenTrack(SimRequest("r", PROMPT))
    outputs = model.forward([FakeRun(track, 4, 7)], {"codes.audio"}, 8)
    assert torch.equal(outputs.hidden[:3], model.rows(model.hidden, track, np.arange(4, 7)))
    assert (outputs.hidden[3:].view(torch.uint8) == GARBAGE_BYTE).all()
    assert outputs.nested()["codes"]["audio"].shape == (3, 3)
    assert model.forward([FakeRun(track, 4, 7)], set(), 3).nested() == {}


def test_the_tap_knows_whose_row_a_row_is():
    tap = RowTap()
    digests = PrefixDigester()
    digests.extend([b"the", b"quick"])
    tap.record("k", [digests[0], digests[1]], [0, 1], torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    given = torch.tensor([[1.0, 2.0], [1.0, 2.0]])
    assert tap.equal("k", [digests[0], digests[1]], [0, 1], given).tolist() == [True, False]
    assert [entry.position for entry in tap.find(given[0])] == [0]
    assert not tap.knows("other", digests[0], 0)


# -- the stage ---------------------------------------------------------------------------------------------------------


def stage_of(scheduler=GEOMETRY, *, keys=(), **options):
    return SimStage(StageConfig(scheduler, **options), FakeModel(hidden_key(4), keys))


def test_a_prompt_with_a_stored_hit_is_delivered_whole():
    with stage_of() as stage:
        for req_id in ("a", "b"):
            stage.submit(SimRequest(req_id, PROMPT))
            stage.build(stage.step())
        delivered = []
        stage.collect(lambda built: delivered.append({r: rows.ranges for r, rows in built.outputs.items()}))
        stage.run_to_end()
        assert delivered == [{"a": ((0, 12),)}, {"b": ((0, 12),)}]
        assert stage.oracle.counts[RowKind.STORED_HIT] == 8


def test_a_hit_on_blocks_whose_forward_never_ran_is_reported_and_never_served():
    with stage_of() as stage:
        stage.submit(SimRequest("a", PROMPT))
        stage.submit(SimRequest("b", PROMPT))
        step = stage.step(faults=lambda schedule: StepFaults(abort_before_forward=frozenset({"a"})))
        stage.build(step)
        failed = []
        stage.collect(lambda built: failed.append(dict(built.outputs.failed)))
        assert isinstance(failed[0]["b"], HitRowsAbsentError)
        stage.run_to_end()
        assert stage.oracle.counts[RowKind.HASHED_NEVER_COMPUTED] == 8
        assert stage.oracle.rows_delivered == 0


def test_a_step_that_never_ran_may_be_tried_again():
    with stage_of() as stage:
        stage.submit(SimRequest("a", PROMPT))
        stage.submit(SimRequest("b", PROMPT))
        assert stage.step(faults=lambda schedule: StepFaults(lost_forward=LostForward.RETRIED)) is None
        stage.run_to_end()
        assert stage.oracle.rows_delivered == 24


def test_a_copied_block_brings_the_rows_of_the_hit_and_no_others():
    """The hit ends inside a block; the rows behind it are of other tokens, and must not come back as this prompt's."""
    scheduler = replace(GEOMETRY, num_blocks=12, partial_block_hits=True)
    delivered = {}
    with stage_of(scheduler, keys=(FakeKey("codes", (3,), torch.int64),)) as stage:
        for req_id, prompt, emitted in (
            ("a", PROMPT, {"codes"}),
            ("b", (*PROMPT[:6], 70, 71, 72), set()),  # copies block 1 of a; 6 of its rows are b's too
            ("c", (*PROMPT[:6], 70, 71, 73), {"codes"}),  # hits both blocks of b
        ):
            stage.submit(SimRequest(req_id, prompt))
            stage.build(stage.step(emitted=frozenset(emitted)))
            stage.collect(lambda built: delivered.update(built.outputs))
        assert stage.oracle.counts[RowKind.COPIED_BLOCK] == 4
        assert delivered["c"].zero_ranges == {"codes": ((6, 8),)}
        stage.run_to_end()


def test_a_stage_says_which_steps_wait_when_too_many_do():
    with stage_of(staging_depth=2) as stage:
        stage.submit(SimRequest("a", PROMPT, max_output_tokens=9))
        stage.step()
        stage.step()
        with pytest.raises(RuntimeError, match=r"steps \[\d+, \d+\] wait to be built, and staging_depth=2"):
            stage.step()
        stage.run_to_end()


class RaisingCache(ReferenceCache):
    """A defect of the cache itself."""

    def materialize(self, step_id, req_ids, sampled_counts=None):
        raise LookupError("the cache broke")


@pytest.mark.parametrize("threaded_builder", [False, True], ids=["inline", "thread"])
def test_what_the_cache_raises_for_a_builder_reaches_the_engine(threaded_builder):
    config = StageConfig(GEOMETRY, threaded_builder=threaded_builder)
    with SimStage(config, FakeModel(hidden_key(4)), make_cache=RaisingCache) as stage:
        stage.submit(SimRequest("a", PROMPT))
        with pytest.raises(LookupError, match="the cache broke"):
            stage.run_to_end()


# -- the judge ---------------------------------------------------------------------------------------------------------


class StaleRows(ReferenceCache):
    """Rows of a block's previous tenant stay readable."""

    def begin_tenancy(self, block_ids):
        return None


class LiveBuffers(ReferenceCache):
    """Reads the engine's output buffers after it overwrote them."""

    def snapshot(self, rows):
        return rows


class LostWrites(ReferenceCache):
    """Every seventh slot is never written, and reads zeros."""

    def read_hit(self, req_id, request):
        found = super().read_hit(req_id, request)
        for position in found:
            if position % 7 == 6:
                found[position] = {HIDDEN_KEY: torch.zeros(self.config.hidden_size, dtype=self.config.hidden_dtype)}
        return found


class ShiftedHits(ReferenceCache):
    """A hit's rows are those of the position before."""

    def read_hit(self, req_id, request):
        found = super().read_hit(req_id, request)
        return {position: found[max(position - 1, 0)] for position in found}


class MissedHits(ReferenceCache):
    """Hits are left out: what an engine without the cache gives."""

    def read_hit(self, req_id, request):
        return {}


class ServesAbsentRows(ReferenceCache):
    """A hit with absent hidden rows reads zeros."""

    def read_hit(self, req_id, request):
        found = super().read_hit(req_id, request)
        request.error = None
        zero = torch.zeros(self.config.hidden_size, dtype=self.config.hidden_dtype)
        return {position: {HIDDEN_KEY: zero} | rows for position, rows in found.items()}


class FailsWithoutCause(ReferenceCache):
    """A hit always fails."""

    def read_hit(self, req_id, request):
        found = super().read_hit(req_id, request)
        if found:
            request.error = HitRowsAbsentError(req_id, "refused for no reason")
        return found


class ForgetsDiscarded(ReferenceCache):
    """Rows of a discarded step are gone."""

    def owe(self, req_id, rows):
        return None


class DeliversTwice(ReferenceCache):
    """Rows of a delivered step are delivered again."""

    def join(self, req_id, rows, leftovers):
        self.owe(req_id, rows)
        return super().join(req_id, rows, leftovers)


class SilentZeros(ReferenceCache):
    """Zeros are not declared in `zero_ranges`."""

    def join(self, req_id, rows, leftovers):
        return replace(super().join(req_id, rows, leftovers), zero_ranges={})


class NeighboursLeftovers(ReferenceCache):
    """Every request gets the whole batch's leftovers of another."""

    def join(self, req_id, rows, leftovers):
        return super().join(req_id, rows, dict.fromkeys(leftovers))


class RoundedRows(ReferenceCache):
    """Rows are off in their last bit."""

    def write(self, slot, rows):
        super().write(
            slot, {key: (row + 1 if not row.is_floating_point() else row * 1.01) for key, row in rows.items()}
        )


WRONG_CACHES = [
    StaleRows,
    LiveBuffers,
    LostWrites,
    ShiftedHits,
    MissedHits,
    ServesAbsentRows,
    FailsWithoutCause,
    ForgetsDiscarded,
    DeliversTwice,
    SilentZeros,
    NeighboursLeftovers,
    RoundedRows,
]


def judged(seed, make_cache):
    config = WorkloadConfig.draw(seed)
    stage = replace(
        config.stage, declare_keys=True, threaded_builder=False, leftovers=True, capture_sizes=(8, 16, 32, 64, 128)
    )
    return run_workload(seed, replace(config, stage=stage, num_requests=25), make_cache=make_cache)


@pytest.mark.parametrize("seed", range(6))
def test_the_judge_has_nothing_against_a_right_cache(seed):
    assert judged(seed, ReferenceCache).rows_delivered > 0


@pytest.mark.parametrize("wrong_cache", WRONG_CACHES, ids=lambda cache: cache.__name__)
def test_the_judge_notices_a_wrong_cache(wrong_cache):
    noticed = []
    for seed in range(6):
        try:
            judged(seed, wrong_cache)
        except OracleViolationError as error:
            noticed.append(error)
            break
    assert noticed
    assert "workload seed=" in noticed[0].__notes__[0]


def test_a_verdict_says_whose_row_was_delivered():
    config = WorkloadConfig.draw(1)
    stage = replace(config.stage, declare_keys=True, threaded_builder=False)
    with pytest.raises(OracleViolationError, match=r"wrong row .* it is the row of position 0 of request"):
        run_workload(1, replace(config, stage=stage), make_cache=ShiftedHits)
