# SPDX-License-Identifier: Apache-2.0
"""Draft tokens: only rows of accepted tokens are delivered, each once, whenever the counts become known."""

import numpy as np
import pytest
from cache_rig import back, more, new
from row_values import assert_rows

from omni_core.prefix_cache.errors import (
    DraftCountError,
    DraftCountMissingError,
    LayoutMismatchError,
    LifecycleError,
)
from omni_core.prefix_cache.outputs import PartialRequest


@pytest.mark.parametrize("accepted", [1, 2, 3, 4])
def test_the_first_sampled_rows_of_a_run_are_delivered_and_the_next_run_goes_on_there(rig, accepted):
    rig.run(new("A", [1, 2, 3], run=4), new("B", [5, 6], run=4))
    taken = rig.run(more("A", 4, drafts=3), more("B", 1), counts={"A": accepted})
    assert_rows(taken["A"], ("A", 4, 4 + accepted))
    assert_rows(taken["B"], ("B", 4, 5))
    taken = rig.run(more("A", 2, at=4 + accepted, drafts=1), more("B", 1), counts={"A": 2})
    assert_rows(taken["A"], ("A", 4 + accepted, 6 + accepted))
    assert_rows(taken["B"], ("B", 5, 6))


def test_counts_may_come_after_the_next_step_was_saved(rig):
    rig.run(new("A", [1, 2, 3], run=4))
    drafted = rig.step(more("A", 4, drafts=3))
    following = rig.step(more("A", 1, at=6))
    assert_rows(rig.take(following, "A")["A"], ("A", 6, 7))
    assert_rows(rig.take(drafted, "A", counts={"A": 2})["A"], ("A", 4, 6))


def test_requests_without_drafts_are_never_clipped(rig):
    """A prefill chunk samples nothing and keeps all its rows; a count for it means nothing."""
    taken = rig.run(new("A", [1], run=4), new("B", [2, 3], run=6), counts={"A": 0, "B": 1, "stranger": 9})
    assert_rows(taken["A"], ("A", 0, 4))
    assert_rows(taken["B"], ("B", 0, 6))


@pytest.mark.parametrize("counts", [None, {}, {"B": 1}])
@pytest.mark.parametrize("asked", [("A",), ("B",), ()])
def test_drafts_without_a_count_are_an_error_that_changes_nothing(rig, counts, asked):
    rig.run(new("A", [1, 2], run=4), new("B", [5, 6], run=4))
    step = rig.step(more("A", 3, drafts=2), more("B", 1))
    with pytest.raises(DraftCountMissingError, match=rf"step {step}: request 'A' has 2 draft tokens.*sampled_counts"):
        rig.cache.materialize(step, asked, counts)
    with pytest.raises(DraftCountMissingError, match="request 'A'"):
        rig.cache.discard_step(step, counts)
    assert_rows(rig.take(step, counts={"A": 1})["A"], ("A", 4, 5))


@pytest.mark.parametrize("count", [-1, 0, 4])
def test_a_count_outside_the_run_is_an_error_that_changes_nothing(rig, count):
    rig.run(new("A", [1, 2], run=4))
    step = rig.step(more("A", 3, drafts=2))
    with pytest.raises(DraftCountError, match=f"says {count} for request 'A', whose run has 3 rows"):
        rig.take(step, "A", counts={"A": count})
    assert_rows(rig.take(step, "A", counts={"A": 3})["A"], ("A", 4, 7))


def test_only_accepted_rows_of_a_discarded_step_are_owed(rig):
    rig.run(new("A", [1, 2, 3], run=4))
    rig.cache.discard_step(rig.step(more("A", 4, drafts=3)), {"A": 2})
    assert_rows(rig.run(more("A", 1, at=6))["A"], ("A", 4, 7))


def test_only_accepted_rows_of_an_unasked_request_are_owed(rig):
    rig.run(new("A", [1, 2, 3], run=4), new("B", [5, 6], run=4))
    step = rig.step(more("A", 4, drafts=3), more("B", 2, drafts=1))
    assert_rows(rig.take(step, "B", counts={"A": 3, "B": 1})["B"], ("B", 4, 5))
    taken = rig.run(more("A", 1, at=7), more("B", 1, at=5))
    assert_rows(taken["A"], ("A", 4, 8))
    assert_rows(taken["B"], ("B", 5, 6))


def test_an_ended_request_is_reported_with_its_accepted_rows_only(rig):
    rig.run(new("A", [1, 2], run=4))
    step = rig.step(more("A", 4, drafts=3))
    rig.begin(finish=["A"])
    rig.cache.discard_step(step, {"A": 2})
    assert rig.cache.take_partial_requests() == (PartialRequest("A", ((4, 6),)),)


def test_reset_reports_no_draft_that_nobody_accepted(rig):
    rig.run(new("A", [1, 2], run=4))
    rig.step(more("A", 4, drafts=3))
    rig.cache.reset()
    assert rig.cache.take_partial_requests() == (PartialRequest("A", ((4, 5),)),)


def test_rejected_rows_are_overwritten_before_a_hit_can_reach_them(rig):
    rig.run(new("A", [1, 2], run=4))
    rig.run(more("A", 4, drafts=3), counts={"A": 1})
    rig.run(more("A", 3, at=5))
    assert_rows(rig.run(new("C", [1, 2, 3], hit=8, run=1))["C"], ("A", 0, 8), ("C", 8, 9))


def test_a_run_that_starts_below_its_drafts_is_no_rejection(rig):
    rig.run(new("A", [1, 2], run=6))
    rig.run(more("A", 2, drafts=1), counts={"A": 1})
    taken = rig.run(more("A", 1, at=6))
    assert isinstance(taken.failed["A"], LifecycleError)


def test_a_rejection_is_told_by_the_step_that_had_drafts_only(rig):
    rig.run(new("A", [1, 2], run=4))
    rig.run(more("A", 3, drafts=2), counts={"A": 3})
    rig.run(more("A", 1))
    assert isinstance(rig.run(more("A", 1, at=6)).failed["A"], LifecycleError)


@pytest.mark.parametrize("accepted", [1, 2, 3])
def test_a_request_preempted_after_drafts_says_how_many_were_accepted(rig, accepted):
    """Prompt and accepted output are 4 + accepted + 1 tokens; the last of them was never fed."""
    rig.run(new("A", [1, 2], run=4))
    drafted = rig.step(more("A", 4, drafts=3))
    resumed = rig.step(back("A", [5, 6, 7], run=5 + accepted, known=5 + accepted))
    assert_rows(rig.take(resumed, "A")["A"], ("A", 4 + accepted, 5 + accepted))
    assert_rows(rig.take(drafted, "A", counts={"A": accepted})["A"], ("A", 4, 4 + accepted))


def test_a_request_preempted_after_drafts_that_does_not_say_is_refused_alone(rig):
    rig.run(new("A", [1, 2], run=4), new("B", [9, 10], run=4))
    rig.run(more("A", 4, drafts=3), more("B", 1), counts={"A": 2})
    taken = rig.run(back("A", [5, 6], run=7), more("B", 1))
    assert isinstance(taken.failed["A"], LifecycleError)
    assert "num_known_tokens" in str(taken.failed["A"])
    assert_rows(taken["B"], ("B", 5, 6))


def test_drafts_while_a_resumed_request_catches_up(rig):
    rig.run(new("A", [1, 2], run=7))
    rig.run(back("A", [3, 4, 5], run=6))
    taken = rig.run(more("A", 4, drafts=3), counts={"A": 2})
    assert_rows(taken["A"], ("A", 7, 8))
    assert_rows(rig.run(more("A", 1, at=8))["A"], ("A", 8, 9))


@pytest.mark.parametrize("drafts", [[3], [-1], [1, 0]])
def test_draft_counts_that_do_not_fit_the_batch_are_refused_before_anything_is_changed(rig, drafts):
    rig.begin(new("A", [1], run=3))
    layout = rig.layout()
    wrong = type(layout)(layout.req_ids, layout.starts, layout.positions, layout.slots, np.array(drafts))
    with pytest.raises(LayoutMismatchError, match="num_draft_tokens"):
        rig.save(layout=wrong)
    assert_rows(rig.take(rig.save(), "A")["A"], ("A", 0, 3))
