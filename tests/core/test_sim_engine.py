# SPDX-License-Identifier: Apache-2.0
"""The simulated stage: rows say where they belong, and every life cycle runs through the real cache and is judged."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from omni_core.prefix_cache.config import Delivery
from omni_core.prefix_cache.errors import ContentReplacedError, HitRowsAbsentError
from omni_core.testing import (
    FakeKey,
    FakeModel,
    LostForward,
    Mishaps,
    Preemption,
    PrefixDigester,
    RowKind,
    RowTap,
    SchedulerConfig,
    SimRequest,
    SimStage,
    StageConfig,
    hidden_key,
)
from omni_core.testing.fake_model import GARBAGE_BYTE, FakeRun
from omni_core.testing.reference_cache import ReferenceCache
from omni_core.testing.sampling import SimDrafter
from omni_core.testing.sim_request import TokenTrack
from omni_core.testing.sim_step import StepFaults

GEOMETRY = SchedulerConfig(num_blocks=8, block_size=4, max_num_tokens=64)
PREEMPTING = replace(GEOMETRY, num_blocks=16, preemption=Preemption.RECOMPUTE_V1)
PROMPT = tuple(range(1, 13))
CODES = FakeKey("codes", (3,), torch.int64)


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
    with stage_of(scheduler, keys=(CODES,)) as stage:
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


# -- life cycles, each through the real cache --------------------------------------------------------------------------


def deliver(stage, step, **options):
    """Build a step; the ranges, or the error's type, of each of its requests."""
    found = {}

    def visit(built):
        found.update({req_id: rows.ranges for req_id, rows in built.outputs.items()})
        found.update({req_id: type(error) for req_id, error in built.outputs.failed.items()})

    stage.build(step)
    stage.collect(visit, **options)
    return found


@pytest.mark.parametrize("form", [Preemption.RECOMPUTE_V1, Preemption.RECOMPUTE_V2])
def test_a_preempted_request_gets_each_row_once(form):
    with stage_of(replace(PREEMPTING, preemption=form)) as stage:
        stage.submit(SimRequest("a", PROMPT, max_output_tokens=4))
        assert deliver(stage, stage.step()) == {"a": ((0, 12),)}
        assert deliver(stage, stage.step()) == {"a": ((12, 13),)}
        stage.engine.scheduler.preempt("a")  # comes back with a hit of 12
        assert deliver(stage, stage.step()) == {"a": ((13, 14),)}
        stage.run_to_end()
        assert stage.oracle.counts[RowKind.RECOMPUTED] == 1


def test_a_longer_hit_after_a_preemption_is_read_back():
    scheduler = replace(PREEMPTING, max_chunk_tokens=4)
    with stage_of(scheduler) as stage:
        stage.submit(SimRequest("a", (*PROMPT, 50)))
        stage.submit(SimRequest("b", (*PROMPT, 60)))
        assert deliver(stage, stage.step()) == {"a": ((0, 4),), "b": ((0, 8),)}
        stage.engine.scheduler.preempt("b", hold=2)
        stage.build(stage.step())
        stage.build(stage.step())
        assert deliver(stage, stage.step())["b"] == ((8, 13),)
        stage.run_to_end()
        assert stage.oracle.counts[RowKind.RESUMED] == 4


def test_each_piece_of_a_prompt_delivers_its_own_rows():
    with stage_of(replace(GEOMETRY, mishaps=Mishaps(piece_delay=0))) as stage:
        stage.submit(SimRequest("a", PROMPT[:6], later_pieces=(PROMPT[6:9], PROMPT[9:])))
        assert [deliver(stage, stage.step())["a"] for _ in range(3)] == [((0, 6),), ((6, 9),), ((9, 12),)]
        stage.run_to_end()


def test_late_results_of_replaced_content_are_refused_and_the_new_content_comes_whole():
    with stage_of() as stage:
        stage.submit(SimRequest("a", PROMPT, max_output_tokens=9))
        late = stage.step()
        stage.engine.scheduler.replace(SimRequest("a", (*PROMPT[:6], 77, 78)))
        assert deliver(stage, stage.step()) == {"a": ((0, 8),)}
        assert deliver(stage, late) == {"a": ContentReplacedError}
        stage.run_to_end()
        assert stage.oracle.counts[RowKind.REPLACED] == 8 + 12


def test_a_hit_on_a_hash_of_replaced_content_is_refused():
    refused = 0
    for seed in range(6):
        with stage_of(replace(GEOMETRY, num_blocks=16, mishaps=Mishaps(seed))) as stage:
            stage.submit(SimRequest("a", PROMPT, max_output_tokens=9))
            stage.build(stage.step())
            stage.engine.scheduler.replace(SimRequest("a", (*PROMPT[:6], 77, 78, 79)))
            stage.build(stage.step())
            stage.submit(SimRequest("b", PROMPT))
            refused += deliver(stage, stage.step())["b"] is HitRowsAbsentError
            stage.run_to_end()
    assert 0 < refused < 6


@pytest.mark.parametrize(("accepted", "rows"), [(1.0, 12 + 7), (0.0, 12 + 7)])
def test_rows_of_rejected_drafts_are_kept_back(accepted, rows):
    scheduler = replace(GEOMETRY, max_draft_tokens=3)
    with stage_of(scheduler, keys=(CODES,), drafts_accepted=accepted) as stage:
        stage.submit(SimRequest("a", PROMPT, max_output_tokens=8))
        stage.run_to_end()
        assert stage.oracle.rows_delivered == rows
        assert (stage.oracle.counts[RowKind.CLIPPED] > 0) is (accepted == 0.0)


def test_rows_that_were_not_acknowledged_come_again():
    with stage_of(delivery=Delivery.TWO_PHASE) as stage:
        stage.submit(SimRequest("a", PROMPT, max_output_tokens=3))
        assert deliver(stage, stage.step(), acknowledged=lambda built: ()) == {"a": ((0, 12),)}
        assert deliver(stage, stage.step()) == {"a": ((0, 13),)}
        stage.run_to_end()
        assert stage.oracle.requests_partial == 0


def test_rows_that_were_never_acknowledged_are_reported():
    with stage_of(delivery=Delivery.TWO_PHASE) as stage:
        stage.submit(SimRequest("a", PROMPT))
        deliver(stage, stage.step(), acknowledged=lambda built: ())
        stage.run_to_end()
        assert stage.oracle.requests_partial == 1
        assert stage.oracle.rows_kept == 0


@pytest.mark.parametrize("device_staging_bytes", [0, 512, 1 << 20])
def test_rows_of_deferred_keys_come_with_their_step(device_staging_bytes):
    options = {"deferred_keys": frozenset({"codes"}), "device_staging_bytes": device_staging_bytes}
    with stage_of(keys=(CODES,), **options) as stage:
        for req_id in ("a", "b"):
            stage.submit(SimRequest(req_id, PROMPT, max_output_tokens=3))
        stage.run_to_end()
        assert stage.oracle.counts[RowKind.DEFERRED] == 28


def test_a_hit_on_blocks_whose_tenancy_the_cache_was_never_told_of_is_refused():
    scheduler = replace(PREEMPTING, block_digests=True, num_blocks=4)
    with stage_of(scheduler) as stage:
        stage.submit(SimRequest("old", tuple(range(50, 62))))
        assert deliver(stage, stage.step()) == {"old": ((0, 12),)}
        stage.submit(SimRequest("hidden", PROMPT))  # gets the blocks of the first, and is taken back
        stage.engine.scheduler.config = replace(scheduler, mishaps=Mishaps(taken_back=1.0))
        assert stage.step() is None
        stage.engine.scheduler.config = scheduler
        stage.abort("hidden")
        stage.submit(SimRequest("hit", PROMPT))
        assert deliver(stage, stage.step()) == {"hit": HitRowsAbsentError}
        stage.run_to_end()
        assert stage.oracle.counts[RowKind.OTHER_CONTENT] == 8


@pytest.mark.parametrize("kernel_block_size", [1, 2, 4])
def test_slots_computed_through_the_kernel_s_finer_blocks_are_the_same(kernel_block_size):
    with stage_of(kernel_block_size=kernel_block_size) as stage:
        for req_id in ("a", "b"):
            stage.submit(SimRequest(req_id, PROMPT))
            stage.build(stage.step())
        stage.run_to_end()
        assert stage.oracle.counts[RowKind.STORED_HIT] == 8


def test_a_kernel_block_that_does_not_divide_the_scheduler_s_is_refused():
    with pytest.raises(ValueError, match="kernel_block_size=3 does not divide block_size=4"):
        StageConfig(GEOMETRY, kernel_block_size=3)


def test_only_the_full_attention_group_of_a_hybrid_model_is_mirrored():
    scheduler = replace(GEOMETRY, num_blocks=12, side_group_window=4, max_chunk_tokens=5)
    with stage_of(scheduler) as stage:
        for index in range(6):
            stage.submit(SimRequest(f"r{index}", (*PROMPT[: 4 * (1 + index % 3)], 50 + index)))
        stage.run_to_end()
        assert stage.oracle.rows_delivered == 2 * (5 + 9 + 13)


def test_the_drafter_is_right_as_often_as_it_is_told():
    model = FakeModel(hidden_key(4))
    track = TokenTrack(SimRequest("r", PROMPT))
    right = model.next_token(track)
    for accepted, expected in ((0.0, {False}), (1.0, {True})):
        drafter = SimDrafter(model, 4, accepted, seed=1)
        guesses = [guess for guess in (drafter(track) for _ in range(40)) if guess]
        assert {guess[0] == right for guess in guesses} == expected
        assert max(map(len, guesses)) == 4
