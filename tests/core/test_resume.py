# SPDX-License-Identifier: Apache-2.0
"""A preempted request that comes back gets every row once, whatever its fresh hit: longer, equal or shorter."""

import pytest
from cache_rig import back, more, new
from row_values import assert_rows

from omni_core.prefix_cache.errors import (
    HitRowsAbsentError,
    LifecycleError,
    PositionGapError,
    RequestEventError,
    RequestNotStartedError,
)
from omni_core.prefix_cache.events import RequestEvent, RequestEventKind
from omni_core.prefix_cache.outputs import PartialRequest


def again(req_id, blocks, hit=0, run=4):
    """The V2 runner's form of `back`: the id enters as new while it is live."""
    return new(req_id, blocks, hit, run)


BOTH_FORMS = pytest.mark.parametrize("form", [back, again], ids=["v1", "v2"])


@BOTH_FORMS
def test_a_longer_hit_is_read_from_where_the_request_stopped(rig, form):
    rig.run(new("B", [1, 2, 3], run=12))
    assert_rows(rig.run(new("A", [1, 5], hit=4, run=2))["A"], ("B", 0, 4), ("A", 4, 6))
    assert_rows(rig.run(form("A", [1, 2, 7], hit=8, run=4))["A"], ("B", 6, 8), ("A", 8, 12))
    assert_rows(rig.run(more("A", 1, blocks=[8]))["A"], ("A", 12, 13))


@BOTH_FORMS
def test_an_equal_hit_delivers_the_new_rows_only(rig, form):
    rig.run(new("A", [1, 2], run=8))
    assert_rows(rig.run(form("A", [1, 2, 7], hit=8, run=3))["A"], ("A", 8, 11))


@BOTH_FORMS
def test_a_shorter_hit_delivers_no_row_twice(rig, form):
    rig.run(new("A", [1, 2], run=7))
    taken = rig.run(form("A", [1, 5], hit=4, run=2), new("B", [6]))
    assert taken["A"].ranges == ()
    assert_rows(taken["A"])
    assert_rows(taken["B"], ("B", 0, 4))
    assert_rows(rig.run(more("A", 2))["A"], ("A", 7, 8))
    assert_rows(rig.run(more("A", 1, blocks=[9]))["A"], ("A", 8, 9))


@BOTH_FORMS
def test_no_hit_at_all_recomputes_everything_and_delivers_only_what_is_new(rig, form):
    rig.run(new("A", [1, 2], run=6))
    assert_rows(rig.run(form("A", [7, 8], run=8))["A"], ("A", 6, 8))


@BOTH_FORMS
def test_rows_discarded_before_the_preemption_come_from_the_new_table(rig, form):
    """Positions below the hit are read there, positions the request computes again come with that step."""
    rig.run(new("B", [1], run=4))
    rig.cache.discard_step(rig.step(new("A", [2, 3], run=6)))
    rig.run(new("E", [2], run=4))  # A's first block has changed hands
    assert_rows(rig.run(form("A", [1, 9], hit=4, run=3))["A"], ("B", 0, 4), ("A", 4, 7))


def test_rows_discarded_before_the_preemption_wait_until_they_are_computed_again(rig):
    rig.cache.discard_step(rig.step(new("A", [2, 3], run=6)))
    assert_rows(rig.run(back("A", [7, 8], run=2))["A"], ("A", 0, 2))
    assert_rows(rig.run(more("A", 3))["A"], ("A", 2, 5))
    assert_rows(rig.run(more("A", 2))["A"], ("A", 5, 7))


def test_a_step_of_before_the_preemption_that_is_discarded_after_it_is_owed_too(rig):
    late = rig.step(new("A", [2, 3], run=6))
    step = rig.step(back("A", [7, 8], run=7))
    rig.cache.discard_step(late)
    assert_rows(rig.take(step, "A")["A"], ("A", 6, 7))
    assert_rows(rig.run(more("A", 1))["A"], ("A", 0, 6), ("A", 7, 8))


def test_steps_around_a_preemption_may_be_taken_in_any_order(rig):
    first = rig.step(new("A", [1, 2], run=6))
    second = rig.step(back("A", [7, 8], run=7))
    third = rig.step(more("A", 1))
    assert_rows(rig.take(third, "A")["A"], ("A", 7, 8))
    assert_rows(rig.take(second, "A")["A"], ("A", 6, 7))
    assert_rows(rig.take(first, "A")["A"], ("A", 0, 6))


def test_a_discarded_resumed_step_gives_its_stored_and_its_new_rows_later(rig):
    rig.run(new("B", [1, 2], run=8))
    rig.run(new("A", [5], run=2))
    rig.cache.discard_step(rig.step(back("A", [1, 2, 7], hit=8, run=2)))
    assert_rows(rig.run(more("A", 1))["A"], ("B", 2, 8), ("A", 8, 11))


def test_a_resumed_request_that_ends_with_rows_missing_is_reported(rig):
    rig.cache.discard_step(rig.step(new("A", [1, 2], run=6)))
    rig.take(rig.step(back("A", [7, 8], run=2), new("B", [5])), "B")
    rig.begin(finish=["A", "B"])
    assert rig.cache.take_partial_requests() == (PartialRequest("A", ((0, 6),)),)


def test_a_hit_that_was_never_computed_fails_the_resumed_request_alone(rig):
    rig.run(new("A", [1], run=2))
    rig.begin(new("Z", [2]))  # hashed, and never saved
    taken = rig.run(back("A", [2, 3], hit=4, run=1), new("B", [5]))
    assert isinstance(taken.failed["A"], HitRowsAbsentError)
    assert "[(2, 4)]" in str(taken.failed["A"])
    assert_rows(taken["B"], ("B", 0, 4))


def test_a_hit_below_what_was_delivered_needs_no_stored_rows(rig):
    rig.run(new("A", [1], run=4))
    rig.begin(new("Z", [2]))
    assert_rows(rig.run(back("A", [2, 3], hit=4, run=1))["A"], ("A", 4, 5))


def test_blocks_of_a_resumed_request_hold_its_rows_for_others(rig):
    rig.run(new("A", [1, 2], run=6))
    rig.run(back("A", [7, 8], run=8))
    assert_rows(rig.run(new("C", [7, 8, 9], hit=8, run=1))["C"], ("A", 0, 8), ("C", 8, 9))


def test_a_resumed_request_hits_rows_of_the_same_step(rig):
    rig.run(new("A", [1], run=3))
    taken = rig.run(new("B", [5, 6], run=8), back("A", [5, 6, 7], hit=8, run=1))
    assert_rows(taken["A"], ("B", 3, 8), ("A", 8, 9))


def test_a_request_resumed_twice(rig):
    rig.run(new("A", [1, 2], run=7))
    rig.run(back("A", [3, 4], run=3))
    assert_rows(rig.run(back("A", [5, 6, 7], run=9))["A"], ("A", 7, 9))


def test_the_next_chunk_of_a_streamed_prompt_delivers_its_own_rows_only(rig):
    """An async-chunk continuation: the id enters as new with its own tokens as its hit, not on a block's edge."""
    rig.run(new("A", [1, 2], run=6))
    assert_rows(rig.run(new("A", [1, 2, 3], hit=6, run=4))["A"], ("A", 6, 10))
    assert_rows(rig.run(new("C", [1, 2, 5], hit=8, run=1))["C"], ("A", 0, 8), ("C", 8, 9))


@pytest.mark.parametrize("kind", [RequestEventKind.RESUMED, RequestEventKind.STARTED])
def test_a_live_request_that_enters_without_blocks_fails_alone(rig, kind):
    rig.run(new("A", [1]), new("B", [2]))
    events = [RequestEvent(kind, "A", (), 0, 1), RequestEvent(RequestEventKind.EXTENDED, "B", (6,))]
    rig.begin_as(events, more("A", 1, blocks=[5]), more("B", 1, blocks=[6]))
    taken = rig.take(rig.save())
    assert isinstance(taken.failed["A"], RequestEventError)
    assert "block list" in str(taken.failed["A"])
    assert_rows(taken["B"], ("B", 4, 5))


def test_a_resumed_request_nobody_knows_fails_alone_and_by_name(rig):
    taken = rig.run(back("A", [1, 2], hit=4, run=1), new("B", [3]))
    assert isinstance(taken.failed["A"], RequestNotStartedError)
    assert "resumed" in str(taken.failed["A"])
    assert_rows(taken["B"], ("B", 0, 4))


def test_a_run_that_does_not_start_at_the_announced_hit_fails_alone(rig):
    rig.run(new("A", [1, 2], run=6))
    rig.begin(back("A", [1, 7], hit=4, run=2))
    rig.schedule(more("A", 1, at=6))
    taken = rig.take(rig.save())
    assert isinstance(taken.failed["A"], PositionGapError)
    assert "up to 4 only" in str(taken.failed["A"])


def test_a_recompute_that_nobody_announced_fails_alone_and_by_name(rig):
    rig.run(new("A", [1, 2], run=6), new("B", [3]))
    taken = rig.run(more("A", 2, at=4), more("B", 1, blocks=[5]))
    assert isinstance(taken.failed["A"], LifecycleError)
    assert "position 4 again" in str(taken.failed["A"])
    assert_rows(taken["B"], ("B", 4, 5))


def test_a_request_that_failed_stays_failed_when_it_is_resumed(rig):
    rig.begin(new("Z", [2]))
    assert set(rig.run(new("A", [2, 3], hit=4, run=1)).failed) == {"A"}
    assert isinstance(rig.run(back("A", [5, 6], run=6)).failed["A"], HitRowsAbsentError)


def test_an_id_used_again_is_another_request_even_in_the_step_that_ends_the_first(rig):
    late = rig.step(new("A", [1, 2], run=5))
    step = rig.step(new("A", [3], run=2), finish=["A"])
    assert_rows(rig.take(step, "A")["A"], ("A", 0, 2))
    assert_rows(rig.take(late, "A")["A"], ("A", 0, 5))


def test_a_late_discard_of_an_earlier_life_is_reported_and_not_owed_to_the_next(rig):
    late = rig.step(new("A", [1, 2], run=5))
    rig.run(new("A", [3], run=2), finish=["A"])
    rig.cache.discard_step(late)
    assert rig.cache.take_partial_requests() == (PartialRequest("A", ((0, 5),)),)
    assert_rows(rig.run(more("A", 1))["A"], ("A", 2, 3))
