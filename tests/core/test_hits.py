# SPDX-License-Identifier: Apache-2.0
"""Prefix hits: which rows stand in front of a step's own, and when there are none."""

import dataclasses

import pytest
import torch
from cache_rig import more, new
from row_values import assert_rows, row_values

from omni_core.prefix_cache.errors import HitRowsAbsentError
from omni_core.prefix_cache.events import RequestEvent, RequestEventKind


def test_a_hit_on_stored_blocks_is_joined_in_front(rig):
    rig.run(new("A", [5, 3, 9], run=12))
    taken = rig.run(new("C", [5, 3, 2], hit=8), new("D", [5, 3, 9, 4], hit=12, run=1))
    assert_rows(taken["C"], ("A", 0, 8), ("C", 8, 12))
    assert_rows(taken["D"], ("A", 0, 12), ("D", 12, 13))


@pytest.mark.parametrize("hit", range(1, 12))
def test_every_hit_length_gives_exactly_its_rows(rig, hit):
    rig.run(new("A", [5, 3, 9], run=11))
    rows = rig.run(new("C", [5, 3, 9, 4], hit=hit, run=12 - hit))["C"]
    assert_rows(rows, ("A", 0, hit), ("C", hit, 12))


def test_a_hit_over_blocks_of_several_requests(rig):
    rig.run(new("A", [1], run=4))
    rig.run(new("B", [1, 2], hit=4, run=4))
    rig.run(new("C", [1, 2, 3], hit=8, run=4), finish=["A", "B"])
    rows = rig.run(new("D", [1, 2, 3, 4], hit=12, run=2), finish=["C"])["D"]
    assert_rows(rows, ("A", 0, 4), ("B", 4, 8), ("C", 8, 12), ("D", 12, 14))


def test_a_hit_whose_prompt_goes_on_in_chunks_comes_with_its_first_step_only(rig):
    rig.run(new("A", [1, 2], run=8))
    assert_rows(rig.run(new("C", [1, 2, 3, 4], hit=8, run=3))["C"], ("A", 0, 8), ("C", 8, 11))
    assert_rows(rig.run(more("C", 3))["C"], ("C", 11, 14))
    assert_rows(rig.run(more("C", 1))["C"], ("C", 14, 15))


def test_a_hit_partly_stored_and_partly_computed_in_the_same_step(rig):
    rig.run(new("A", [1], run=4))
    taken = rig.run(new("B", [1, 2], hit=4, run=4), new("C", [1, 2, 3], hit=8, run=4), finish=["A"])
    assert_rows(taken["B"], ("A", 0, 4), ("B", 4, 8))
    assert_rows(taken["C"], ("A", 0, 4), ("B", 4, 8), ("C", 8, 12))


def test_a_wrongly_announced_row_count_changes_nothing(rig):
    rig.run(new("A", [1, 2], run=8))
    for number, announced in enumerate((0, 1, 50)):
        req_id = f"r{number}"
        event = RequestEvent(RequestEventKind.STARTED, req_id, (1, 2, 3 + number), 8, announced)
        rig.begin_as([event], new(req_id, [1, 2, 3 + number], hit=8, run=4))
        assert_rows(rig.take(rig.save())[req_id], ("A", 0, 8), (req_id, 8, 12))


def test_the_order_of_a_steps_events_does_not_matter(rig):
    rig.run(new("Z", [5]))
    events = [
        RequestEvent(RequestEventKind.STARTED, "C", (5, 6), 4, 4),
        RequestEvent(RequestEventKind.STARTED, "A", (5,), 0, 4),
        RequestEvent(RequestEventKind.FINISHED, "Z"),
    ]
    rig.begin_as(events, new("A", [5]), new("C", [5, 6], hit=4))
    taken = rig.take(rig.save())
    assert_rows(taken["C"], ("A", 0, 4), ("C", 4, 8))


# -- tenancy


def test_a_recycled_block_has_none_of_its_last_tenants_rows_of_any_key(make_rig):
    rig = make_rig(keys={"old": ((4,), torch.float32), "new": ((4,), torch.float32)})
    rig.run(new("Z", [5]), keys=["old"])
    rig.run(new("A", [5]), keys=["new"], finish=["Z"])
    rows = rig.run(new("C", [5, 6], hit=4), keys=["old", "new"])["C"]
    assert_rows(rows, ("A", 0, 4), ("C", 4, 8))
    assert_rows(rows, ("A", 0, 4), ("C", 4, 8), key="new", trailing=(4,))
    assert rows.zero_ranges == {"old": ((0, 4),)}
    assert not rows["old"][:4].any()


@pytest.mark.parametrize("how", ["started", "extended", "copied"])
def test_a_block_that_changes_hands_has_no_rows_until_its_new_owner_writes_some(rig, how):
    rig.run(new("Z", [5]), new("A", [1, 2], run=8))
    if how == "started":
        rig.begin(new("B", [5]), finish=["Z"])
    elif how == "extended":
        rig.begin(more("A", 4, blocks=[5]), finish=["Z"])
    else:
        rig.begin(copies=[(9, 5)], finish=["Z"])
    # The forward of that step never brings its rows.
    taken = rig.run(new("C", [5, 6], hit=4))
    assert isinstance(taken.failed["C"], HitRowsAbsentError)


def test_a_block_taken_over_as_part_of_a_hit_keeps_its_rows(rig):
    rig.run(new("A", [1, 2], run=8))
    rig.begin(finish=["A"])
    assert_rows(rig.run(new("C", [1, 2, 3], hit=8))["C"], ("A", 0, 8), ("C", 8, 12))
    assert_rows(rig.run(new("D", [1, 2, 4], hit=8), finish=["C"])["D"], ("A", 0, 8), ("D", 8, 12))


def test_a_write_claims_only_the_keys_it_brings(make_rig):
    rig = make_rig(keys={"codes": ((4,), torch.float32)})
    rig.run(new("A", [1]))
    # Within one tenancy block 1's slots are written once more, hidden rows only.
    rig.begin(new("B", [2]))
    layout = dataclasses.replace(rig.layout(), slots=rig.layout().slots - 4)
    rig.take(rig.save(layout=layout, keys=()))
    rows = rig.run(new("C", [1, 3], hit=4))["C"]
    assert_rows(rows, ("B", 0, 4), ("C", 4, 8))
    assert_rows(rows, ("A", 0, 4), ("C", 4, 8), key="codes", trailing=(4,))


def test_of_a_slot_written_twice_in_one_step_the_later_row_stays(make_rig):
    rig = make_rig(keys={"codes": ((), torch.int64)})
    rig.begin(new("A", [1], run=3), new("B", [2], run=3), new("D", [1, 3], hit=3, run=1))
    layout = rig.layout()
    slots = layout.slots.copy()
    slots[3:6] = slots[0:3]
    taken = rig.take(rig.save(layout=dataclasses.replace(layout, slots=slots)))
    assert_rows(taken["A"], ("A", 0, 3))
    assert_rows(taken["B"], ("B", 0, 3))
    assert_rows(taken["D"], ("B", 0, 3), ("D", 3, 4))
    rows = rig.run(new("C", [1, 4], hit=3, run=1))["C"]
    assert_rows(rows, ("B", 0, 3), ("C", 3, 4))
    assert_rows(rows, ("B", 0, 3), ("C", 3, 4), key="codes", trailing=(), dtype=torch.int64)


@pytest.mark.parametrize("unstored", [(0,), (3,), (1, 2), (0, 1, 2, 3)])
def test_rows_without_a_slot_are_delivered_and_never_stored(rig, unstored):
    rig.begin(new("A", [1]))
    layout = rig.layout()
    layout.slots[list(unstored)] = -1
    assert_rows(rig.take(rig.save(layout=layout))["A"], ("A", 0, 4))
    stored_front = min(unstored)
    assert isinstance(rig.run(new("C", [1, 2], hit=4)).failed["C"], HitRowsAbsentError)
    if stored_front:
        rows = rig.run(new("D", [1, 3], hit=stored_front, run=1))["D"]
        assert_rows(rows, ("A", 0, stored_front), ("D", stored_front, stored_front + 1))


# -- absent rows


def test_an_absent_hit_fails_its_request_for_good_and_names_the_positions(rig):
    rig.run(new("A", [1], run=4))
    taken = rig.run(new("C", [1, 2, 3], hit=8), new("D", [1, 4], hit=4))
    with pytest.raises(HitRowsAbsentError, match=r"request 'C'.*\[\(4, 8\)\]"):
        taken["C"]
    assert list(taken) == ["D"]
    assert len(taken) == 1
    assert_rows(taken["D"], ("A", 0, 4), ("D", 4, 8))
    taken = rig.run(more("C", 1, blocks=[5]), more("D", 1, blocks=[6]))
    assert isinstance(taken.failed["C"], HitRowsAbsentError)
    assert_rows(taken["D"], ("D", 8, 9))
    assert rig.cache.stats().requests_failed == 1
    # Its own rows were stored all the same: its third block serves others.
    rig.run(new("B", [1, 2], hit=4), finish=["C"])
    assert_rows(rig.run(new("E", [1, 2, 3, 7], hit=12))["E"], ("A", 0, 4), ("B", 4, 8), ("C", 8, 12), ("E", 12, 16))


def test_an_ended_failed_request_leaves_its_id_free(rig):
    taken = rig.run(new("C", [1, 2], hit=4))
    assert set(taken.failed) == {"C"}
    rig.cache.discard_step(rig.step(new("C", [3]), abort=["C"]))
    assert_rows(rig.run(more("C", 1, blocks=[4]))["C"], ("C", 0, 5))


# -- block copies


def test_a_block_copy_carries_the_rows_of_every_key(make_rig):
    rig = make_rig(keys={"codes": ((2, 2), torch.bfloat16)})
    rig.run(new("A", [1, 2], run=6))
    rows = rig.run(new("C", [1, 3], hit=6, run=2), copies=[(2, 3)])["C"]
    assert_rows(rows, ("A", 0, 6), ("C", 6, 8))
    assert_rows(rows, ("A", 0, 6), ("C", 6, 8), key="codes", trailing=(2, 2), dtype=torch.bfloat16)
    # The source still holds its own rows.
    assert_rows(rig.run(more("A", 2))["A"], ("A", 6, 8))
    assert_rows(rig.run(new("D", [1, 2, 4], hit=8))["D"], ("A", 0, 8), ("D", 8, 12))
    assert_rows(rig.run(new("E", [1, 3, 5], hit=8))["E"], ("A", 0, 6), ("C", 6, 8), ("E", 8, 12))


def test_a_copy_of_a_block_whose_write_is_still_under_way(rig):
    with rig.held():
        first = rig.step(new("A", [1]))
        second = rig.step(new("C", [3, 4], hit=4), copies=[(1, 3)])
    assert_rows(rig.take(second)["C"], ("A", 0, 4), ("C", 4, 8))
    assert_rows(rig.take(first, "A")["A"], ("A", 0, 4))


def test_a_chain_of_copies_in_one_step(rig):
    rig.run(new("A", [1]))
    taken = rig.run(new("C", [3, 4], hit=4), new("D", [2, 5], hit=4), copies=[(1, 2), (2, 3)])
    assert_rows(taken["C"], ("A", 0, 4), ("C", 4, 8))
    assert_rows(taken["D"], ("A", 0, 4), ("D", 4, 8))


def test_a_chain_of_copies_in_the_other_order_moves_what_each_source_held(rig):
    rig.run(new("A", [1]), new("B", [2]))
    taken = rig.run(new("C", [3, 4], hit=4), new("D", [2, 5], hit=4), copies=[(2, 3), (1, 2)], finish=["A", "B"])
    assert_rows(taken["C"], ("B", 0, 4), ("C", 4, 8))
    assert_rows(taken["D"], ("A", 0, 4), ("D", 4, 8))


def test_a_source_that_changes_hands_in_the_step_gives_the_rows_it_had(rig):
    rig.run(new("A", [1]))
    taken = rig.run(new("D", [1]), new("C", [3, 4], hit=4), copies=[(1, 3)], finish=["A"])
    assert_rows(taken["C"], ("A", 0, 4), ("C", 4, 8))
    assert_rows(taken["D"], ("D", 0, 4))
    assert_rows(rig.run(new("E", [1, 5], hit=4))["E"], ("D", 0, 4), ("E", 4, 8))


def test_a_copy_of_an_absent_block_leaves_the_destination_absent(rig):
    rig.run(new("A", [1]), new("B", [3]))
    taken = rig.run(new("C", [3, 4], hit=4), new("D", [1, 5], hit=4), copies=[(9, 3)], finish=["B"])
    assert isinstance(taken.failed["C"], HitRowsAbsentError)
    assert_rows(taken["D"], ("A", 0, 4), ("D", 4, 8))


def test_a_copy_carries_only_the_rows_that_are_there(make_rig):
    rig = make_rig(keys={"codes": ((4,), torch.float32)})
    rig.run(new("A", [1], run=2))
    rig.run(more("A", 1), keys=())
    rows = rig.run(new("C", [3], hit=3, run=1), copies=[(1, 3)])["C"]
    assert_rows(rows, ("A", 0, 3), ("C", 3, 4))
    assert rows.zero_ranges == {"codes": ((2, 3),)}
    assert torch.equal(rows["codes"][:2], row_values("A", range(2), "codes", (4,)))
    taken = rig.run(new("D", [5, 6], hit=4, run=1), copies=[(1, 5)])
    assert isinstance(taken.failed["D"], HitRowsAbsentError)
    assert "[(3, 4)]" in str(taken.failed["D"])


def test_an_unaligned_hit_after_a_copy_never_shows_the_sources_later_rows(rig):
    rig.run(new("A", [1, 2], run=8))
    # C shares 6 tokens; it writes on in its own copy of block 2 and stops before the block is full.
    rig.run(new("C", [1, 3], hit=6, run=1), copies=[(2, 3)])
    taken = rig.run(new("E", [1, 3, 5], hit=8, run=2))
    assert isinstance(taken.failed["E"], HitRowsAbsentError), "row 7 of block 3 would be A's, of other tokens"
    rows = rig.run(new("D", [1, 3, 4], hit=7, run=2))["D"]
    assert_rows(rows, ("A", 0, 6), ("C", 6, 7), ("D", 7, 9))
    assert_rows(rig.run(new("F", [1, 2, 6], hit=8, run=2))["F"], ("A", 0, 8), ("F", 8, 10))


# -- ids used again


def test_an_id_used_again_while_an_old_step_of_it_is_open(rig):
    old = rig.step(new("A", [1]))
    fresh = rig.step(new("A", [2], run=2), finish=["A"])
    assert_rows(rig.take(fresh, "A")["A"], ("A", 0, 2))
    assert_rows(rig.take(old, "A")["A"], ("A", 0, 4))
    assert_rows(rig.run(more("A", 2))["A"], ("A", 2, 4))


def test_rows_of_an_id_that_ended_are_never_owed_to_its_next_life(rig):
    old = rig.step(new("A", [1]))
    rig.run(new("A", [2], run=2), finish=["A"])
    rig.cache.discard_step(old)
    assert_rows(rig.run(more("A", 2))["A"], ("A", 2, 4))
    (partial,) = rig.cache.take_partial_requests()
    assert partial.req_id == "A"
    assert partial.missing == ((0, 4),)
