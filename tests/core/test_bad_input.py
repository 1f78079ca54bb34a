# SPDX-License-Identifier: Apache-2.0
"""Wrong calls: each has an error of its own, raised before anything is changed, and the right call still works."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from cache_rig import SHORT_S, more, new
from row_values import assert_rows

from omni_core.backend import NoBackendForTensorError
from omni_core.prefix_cache.errors import (
    BlockSizeMismatchError,
    CacheFailedError,
    HitRowsAbsentError,
    LayoutMismatchError,
    OmniPrefixCacheUnmatchError,
    PositionGapError,
    RequestEventError,
    RequestNotInStepError,
    RequestNotStartedError,
    SlotOutOfRangeError,
    StepOrderError,
    StepTooLargeError,
    UnknownKeyError,
    UnknownStepError,
)
from omni_core.prefix_cache.events import BlockCopy, RequestEvent, RequestEventKind, StepEvents
from omni_core.prefix_cache.slot_table import SlotTable


def changed(rig, **fields):
    layout = rig.layout()
    values = {name: change(copy.copy(getattr(layout, name))) for name, change in fields.items()}
    return dataclasses.replace(layout, **values)


def at(index, value):
    def change(array):
        array[index] = value
        return array

    return change


BAD_LAYOUTS = {
    "slot-above-the-pool": ({"slots": at(1, 65)}, SlotOutOfRangeError, "slot 65 .*num_blocks=16 x block_size=4 = 64"),
    "slot-far-below": ({"slots": at(1, -2)}, SlotOutOfRangeError, "slot -2 "),
    "offset": ({"slots": at(1, 10)}, BlockSizeMismatchError, r"slot 10 for position 1 .*block_size=4"),
    "too-few-slots": ({"slots": lambda array: array[:-1]}, LayoutMismatchError, "4 slots"),
    "too-few-positions": ({"positions": lambda array: array[:-1]}, LayoutMismatchError, "4 positions"),
    "starts-too-short": ({"starts": lambda array: array[:-1]}, LayoutMismatchError, "2 requests and 2 starts"),
    "starts-not-at-zero": ({"starts": at(0, 1)}, LayoutMismatchError, "starts run from 1 to 5"),
    "starts-end-early": ({"starts": at(2, 4)}, LayoutMismatchError, "starts run from 0 to 4 for 5 rows"),
    "starts-fall": ({"starts": at(1, 5)}, LayoutMismatchError, "must rise"),
    "gap-in-positions": ({"positions": at(2, 3), "slots": at(2, 7)}, LayoutMismatchError, "consecutive"),
    "slots-of-two-dimensions": ({"slots": lambda array: array[:, None]}, LayoutMismatchError, r"slots is .*\(5, 1\)"),
    "positions-as-a-list": ({"positions": list}, LayoutMismatchError, "positions is a list.*make each a flat"),
    "starts-as-floats": ({"starts": lambda array: array.astype(float)}, LayoutMismatchError, "starts is .* float64"),
    "drafts-as-a-list": ({"num_draft_tokens": lambda _: [0, 0]}, LayoutMismatchError, "num_draft_tokens is a list"),
    "drafts-as-floats": ({"num_draft_tokens": lambda _: np.zeros(2)}, LayoutMismatchError, "_tokens is .* float64"),
    "position-beyond-the-cache": (
        {"positions": lambda array: array + 64},
        LayoutMismatchError,
        "position 69 lies beyond the KV cache, which holds 64 tokens",
    ),
    "negative-position": (
        {"positions": lambda array: array - 4},
        LayoutMismatchError,
        "not negative",
    ),
}


@pytest.mark.parametrize("name", BAD_LAYOUTS)
def test_a_layout_that_cannot_be_right_is_refused_before_anything_changes(rig, name):
    fields, error, message = BAD_LAYOUTS[name]
    rig.run(new("Z", [9]))
    rig.begin(new("A", [1], run=3), new("C", [9, 2], hit=4, run=2))
    before = rig.stats()
    with pytest.raises(error, match=message) as raised:
        rig.save(layout=changed(rig, **fields))
    assert isinstance(raised.value, OmniPrefixCacheUnmatchError)
    assert rig.stats() == before
    taken = rig.take(rig.save())
    assert_rows(taken["A"], ("A", 0, 3))
    assert_rows(taken["C"], ("Z", 0, 4), ("C", 4, 6))


def test_a_request_named_twice_in_a_layout_is_refused(rig):
    rig.begin(new("A", [1], run=2), new("B", [2], run=2))
    with pytest.raises(LayoutMismatchError, match="'A' occurs twice"):
        rig.save(layout=dataclasses.replace(rig.layout(), req_ids=("A", "A")))
    assert set(rig.take(rig.save())) == {"A", "B"}


def test_a_step_without_rows_is_refused(rig):
    rig.begin()
    with pytest.raises(LayoutMismatchError, match="without rows"):
        rig.cache.save_outputs(torch.zeros(0, 3), {}, num_tokens_unpadded=0, num_tokens_padded=0)


BAD_HIDDEN = {
    "too-many-rows": (lambda rows: torch.cat([rows, rows]), {}, LayoutMismatchError, r"\(8, 3\)"),
    "too-few-rows": (lambda rows: rows[:3], {}, LayoutMismatchError, r"\(3, 3\)"),
    "three-dimensions": (lambda rows: rows[None], {}, LayoutMismatchError, r"\(1, 4, 3\)"),
    "one-dimension": (lambda rows: rows[:, 0], {}, LayoutMismatchError, r"\(4,\)"),
    "padded-below-real": (lambda rows: rows[:2], {"padded": 2}, LayoutMismatchError, "num_tokens_padded=2"),
    "width": (lambda rows: torch.cat([rows, rows], 1), {}, OmniPrefixCacheUnmatchError, r"\(6,\)"),
    "dtype": (lambda rows: rows.double(), {}, OmniPrefixCacheUnmatchError, "torch.float64"),
    "device": (lambda rows: rows.to("meta"), {}, NoBackendForTensorError, "meta.*'cpu_sim'"),
}


@pytest.mark.parametrize("name", BAD_HIDDEN)
def test_hidden_states_that_fit_nothing_are_refused_before_anything_changes(rig, name):
    change, options, error, message = BAD_HIDDEN[name]
    rig.run(new("Z", [9]))
    rig.begin(new("A", [1]), finish=["Z"])
    before = rig.stats()
    with pytest.raises(error, match=message):
        rig.save(hidden=change(rig.rows()), **options)
    assert rig.stats() == before
    assert_rows(rig.take(rig.save())["A"], ("A", 0, 4))


@pytest.mark.parametrize("value", [torch.zeros(4, 2, device="meta"), [torch.zeros(2, device="meta")]])
def test_an_output_on_a_device_nobody_owns_is_refused_before_anything_changes(rig, value):
    rig.begin(new("A", [1]))
    before = rig.stats()
    with pytest.raises(NoBackendForTensorError, match="'codes'"):
        rig.save({"codes": value})
    assert rig.stats() == before
    rig.take(rig.save())


def test_a_step_larger_than_a_staging_arena_is_refused_before_anything_changes(make_rig):
    rig = make_rig(max_num_tokens=4, extra_row_bytes=0, extra_step_bytes=64)
    rig.begin(new("A", [1, 2, 3, 4], run=16))
    before = rig.stats()
    with pytest.raises(StepTooLargeError, match=r"16 rows .*max_num_tokens=4, extra_row_bytes=0, extra_step_bytes=64"):
        rig.save()
    assert rig.stats() == before
    rig.begin(new("B", [5], run=4))
    with pytest.raises(StepTooLargeError, match="staging arena"):
        rig.save({"list": [torch.zeros(100)]})
    assert_rows(rig.take(rig.save())["B"], ("B", 0, 4))


@pytest.mark.parametrize("block", [-1, 16, 10**9])
@pytest.mark.parametrize(
    "events",
    [
        lambda block: StepEvents((RequestEvent(RequestEventKind.STARTED, "B", (2, block), 0, 4),)),
        lambda block: StepEvents((RequestEvent(RequestEventKind.STARTED, "B", (block, 2), 4, 4),)),
        lambda block: StepEvents((RequestEvent(RequestEventKind.EXTENDED, "A", (block,)),)),
        lambda block: StepEvents(block_copies=(BlockCopy(block, 3),)),
        lambda block: StepEvents(block_copies=(BlockCopy(1, block),)),
    ],
    ids=["started", "hit", "extended", "copy-source", "copy-destination"],
)
def test_a_block_outside_the_kv_cache_is_refused_before_anything_changes(rig, events, block):
    rig.run(new("A", [1]))
    before = rig.stats()
    bad = events(block)
    others = (RequestEvent(RequestEventKind.FINISHED, "A"), RequestEvent(RequestEventKind.STARTED, "D", (1,), 0, 4))
    with pytest.raises(SlotOutOfRangeError, match=f"block {block} .*num_blocks=16"):
        rig.cache.new_step_starts(dataclasses.replace(bad, requests=others + bad.requests))
    assert rig.stats() == before
    assert_rows(rig.run(more("A", 1, blocks=[4]), new("C", [1, 5], hit=4))["C"], ("A", 0, 4), ("C", 4, 8))


def test_a_step_is_announced_once_and_saved_once(rig):
    rig.schedule(new("A", [1]))
    with pytest.raises(StepOrderError, match="new_step_starts"):
        rig.save()
    step = rig.step(new("B", [2]))
    before = rig.stats()
    with pytest.raises(StepOrderError, match="new_step_starts"):
        rig.save()
    assert rig.stats() == before
    assert_rows(rig.take(step)["B"], ("B", 0, 4))


def test_a_request_outside_the_step_is_refused_and_the_step_stays(rig):
    step = rig.step(new("A", [1]), new("B", [2]))
    with pytest.raises(RequestNotInStepError, match=rf"'X' is not in step {step}; it has 2: 'A', 'B'"):
        rig.take(step, "A", "X")
    assert set(rig.take(step)) == {"A", "B"}


def test_asking_for_one_request_twice_gives_it_once(rig):
    assert list(rig.cache.materialize(rig.step(new("A", [1])), ["A", "A"])) == ["A"]


@pytest.mark.parametrize("step_id", [0, -1, 7])
def test_a_step_never_saved_is_unknown(rig, step_id):
    with pytest.raises(UnknownStepError, match=f"step {step_id} was never saved; no step was saved so far"):
        rig.cache.materialize(step_id, [])
    rig.run(new("A", [1]))
    with pytest.raises(UnknownStepError, match=f"step {step_id} was never saved; ids given out so far: 1 to 1"):
        rig.cache.discard_step(step_id)


def test_rows_asked_of_an_output_by_a_wrong_name_say_which_there_are(rig):
    taken = rig.run(new("A", [1]))
    with pytest.raises(UnknownKeyError, match="no rows under key 'codes'; keys delivered: '__hidden_states__'"):
        taken["A"]["codes"]
    with pytest.raises(KeyError):
        taken["B"]


# -- one request's contradictions are that request's


def test_a_request_in_a_step_that_was_never_started_fails_alone(rig):
    rig.begin_as([RequestEvent(RequestEventKind.STARTED, "B", (2,), 0, 4)], new("A", [1]), new("B", [2]))
    taken = rig.take(rig.save())
    assert isinstance(taken.failed["A"], RequestNotStartedError)
    assert_rows(taken["B"], ("B", 0, 4))
    # Its rows are in their slots nevertheless.
    assert_rows(rig.run(new("C", [1, 3], hit=4))["C"], ("A", 0, 4), ("C", 4, 8))


def test_rows_of_a_request_never_started_are_owed_to_nobody(rig):
    rig.begin_as([], new("A", [1]))
    rig.cache.discard_step(rig.save())
    assert rig.cache.take_partial_requests() == ()
    assert_rows(rig.run(new("A", [2], run=2))["A"], ("A", 0, 2))
    rig.begin(finish=["A"])
    assert rig.cache.take_partial_requests() == ()


@pytest.mark.parametrize(("blocks", "hit"), [((1,), 5), ((), 1), ((1, 2), -1)])
def test_a_start_that_contradicts_itself_fails_alone(rig, blocks, hit):
    rig.run(new("Z", [1, 2], run=8))
    event = RequestEvent(RequestEventKind.STARTED, "A", blocks, hit, 2)
    rig.begin_as([event, RequestEvent(RequestEventKind.STARTED, "B", (5,), 0, 4)], new("A", [3], run=2), new("B", [5]))
    taken = rig.take(rig.save())
    assert isinstance(taken.failed["A"], RequestEventError)
    assert f"num_computed_tokens={hit}" in str(taken.failed["A"])
    assert_rows(taken["B"], ("B", 0, 4))


def test_a_request_started_twice_in_one_step_fails_alone(rig):
    start = RequestEvent(RequestEventKind.STARTED, "A", (1,), 0, 4)
    rig.begin_as([start, start, RequestEvent(RequestEventKind.STARTED, "B", (2,), 0, 4)], new("A", [1]), new("B", [2]))
    taken = rig.take(rig.save())
    assert isinstance(taken.failed["A"], RequestEventError)
    assert "twice" in str(taken.failed["A"])
    assert_rows(taken["B"], ("B", 0, 4))


def test_blocks_of_a_request_nobody_knows_change_hands_all_the_same(rig):
    rig.run(new("A", [1]))
    rig.begin(events=[RequestEvent(RequestEventKind.EXTENDED, "unknown", (1,))])
    taken = rig.run(new("C", [1, 2], hit=4))
    assert isinstance(taken.failed["C"], HitRowsAbsentError)
    assert rig.cache.stats().live_requests == 2


def test_a_request_that_skips_positions_fails_alone(rig):
    rig.run(new("A", [1, 2], run=3), new("B", [3], run=3))
    taken = rig.run(more("A", 2, at=5), more("B", 1))
    assert isinstance(taken.failed["A"], PositionGapError)
    assert "position 5" in str(taken.failed["A"])
    assert "up to 3 only" in str(taken.failed["A"])
    assert_rows(taken["B"], ("B", 3, 4))
    assert isinstance(rig.run(more("A", 1)).failed["A"], PositionGapError)


def test_the_layout_source_may_fail_without_harm(rig):
    rig.begin(new("A", [1]))
    batch, rig.batch = rig.batch, None
    with pytest.raises(TypeError):
        rig.cache.save_outputs(torch.zeros(4, 3), {}, num_tokens_unpadded=4, num_tokens_padded=4)
    rig.batch = batch
    assert_rows(rig.take(rig.save())["A"], ("A", 0, 4))


def test_staging_that_stays_full_leaves_the_step_to_be_saved_later(make_rig):
    rig = make_rig(staging_depth=1, staging_claim_timeout_s=SHORT_S)
    step = rig.step(new("A", [1]))
    rig.cache.flush()
    rig.begin(new("B", [2]), new("C", [1, 3], hit=4))
    before = rig.stats()
    with pytest.raises(TimeoutError, match=f"staging_depth=1 slots are held by unread steps .step {step}."):
        rig.save()
    assert rig.stats() == before
    rig.take(step, "A")
    taken = rig.take(rig.save())
    assert_rows(taken["C"], ("A", 0, 4), ("C", 4, 8))


def test_int32_arrays_as_a_runner_keeps_them_are_fine(rig):
    rig.begin(new("A", [1, 2], run=6))
    layout = rig.layout()
    small = dataclasses.replace(
        layout,
        starts=layout.starts.astype(np.int32),
        positions=layout.positions.astype(np.int32),
        slots=layout.slots.astype(np.int32),
    )
    assert_rows(rig.take(rig.save(layout=small))["A"], ("A", 0, 6))
    assert_rows(rig.run(new("C", [1, 2, 3], hit=6))["C"], ("A", 0, 6), ("C", 6, 10))


def test_a_save_that_breaks_half_way_fails_the_cache_and_holds_no_page(make_rig, monkeypatch):
    rig = make_rig(staging_depth=2)
    rig.run(new("A", [1, 2], run=4)).release()

    def broken(*arguments):
        raise ArithmeticError("an internal error")

    for _ in range(4):  # more often than there are pages
        rig.begin(more("A"))
        with monkeypatch.context() as patch:
            patch.setattr(SlotTable, "claim", broken)
            with pytest.raises(ArithmeticError):
                rig.save()
        with pytest.raises(CacheFailedError, match="an internal error"):
            rig.begin(more("A"))
        assert "an internal error" in rig.cache.reset().failure_cleared
        taken = rig.run(new("A", [1, 2], run=4), finish=["A"])
        assert_rows(taken["A"], ("A", 0, 4))
        taken.release()
    assert rig.runtime.comes_true(lambda: rig.cache.stats().staging_slots_in_use == 0)
    assert rig.cache.close()


@pytest.mark.parametrize("adapter_id", [None, "7", 1.5, -1, True])
def test_an_adapter_that_is_none_fails_its_request_alone(rig, adapter_id):
    rig.begin(new("A", [1], adapter=adapter_id), new("B", [2]))
    taken = rig.take(rig.save())
    assert isinstance(taken.failed["A"], RequestEventError)
    assert "adapter_id" in str(taken.failed["A"])
    assert_rows(taken["B"], ("B", 0, 4))


@pytest.mark.parametrize("adapter_id", [0, -1, None, "7", 1.5, True, float("nan")])
def test_a_version_of_no_adapter_is_refused(rig, adapter_id):
    with pytest.raises(ValueError, match=f"adapter_id={adapter_id!r}: must be the id of an adapter"):
        rig.cache.bump_adapter_version(adapter_id)
