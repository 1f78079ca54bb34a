# SPDX-License-Identifier: Apache-2.0
"""A replaced content is a new version: its rows are delivered, late results of the old one are dropped."""

import pytest
from cache_rig import more, new, replaced
from row_values import assert_rows

from omni_core.prefix_cache.errors import ContentReplacedError, HitRowsAbsentError
from omni_core.prefix_cache.events import FilledBlock, RequestEvent, RequestEventKind, StepEvents


def test_the_new_version_is_delivered_from_its_kept_prefix_on(rig):
    rig.run(new("A", [1, 2], run=7))
    taken = rig.run(replaced("A", [1, 5], hit=4, run=3, content="A2"), new("B", [6]))
    assert_rows(taken["A"], ("A", 0, 4), ("A2", 4, 7))
    assert_rows(taken["B"], ("B", 0, 4))
    assert_rows(rig.run(more("A", 1))["A"], ("A2", 7, 8))


def test_open_steps_of_the_old_version_answer_with_a_typed_error_and_the_others_are_served(rig):
    old = rig.step(new("A", [1, 2], run=6), new("B", [3]))
    step = rig.step(replaced("A", [1, 5], hit=4, run=2, content="A2"), more("B", 1, blocks=[7]))
    taken = rig.take(old, "A", "B")
    assert isinstance(taken.failed["A"], ContentReplacedError)
    assert f"step {old}" in str(taken.failed["A"])
    assert_rows(taken["B"], ("B", 0, 4))
    assert_rows(rig.take(step, "A")["A"], ("A", 0, 4), ("A2", 4, 6))


def test_missing_rows_of_the_old_version_are_forgotten_not_owed_and_not_reported(rig):
    rig.cache.discard_step(rig.step(new("A", [1, 2], run=6)))
    old = rig.step(more("A", 1))
    assert_rows(rig.run(replaced("A", [5], run=3, content="A2"))["A"], ("A2", 0, 3))
    rig.cache.discard_step(old)
    assert_rows(rig.run(more("A", 1))["A"], ("A2", 3, 4))
    rig.begin(finish=["A"])
    assert rig.cache.take_partial_requests() == ()


def test_two_replacements_before_the_first_admission_leave_the_last_version_only(rig):
    events = [
        RequestEvent(RequestEventKind.REPLACED, "A", (1,), 0, 0),
        RequestEvent(RequestEventKind.REPLACED, "A", (2,), 0, 3),
    ]
    rig.begin_as(events, replaced("A", [2], run=3, content="A3"))
    assert_rows(rig.take(rig.save(), "A")["A"], ("A3", 0, 3))


def test_a_replacement_without_new_tokens_is_delivered_by_the_step_that_runs(rig):
    rig.run(new("A", [1, 2], run=6), new("B", [9]))
    event = RequestEvent(RequestEventKind.REPLACED, "A", (1,), 4, 0)
    rig.begin_as([event, RequestEvent(RequestEventKind.EXTENDED, "B", (10,))], more("B", 1, blocks=[10]))
    rig.take(rig.save())
    rig.retable("A", [1])
    rig.begin(more("A", 2, blocks=[5], at=4))
    assert_rows(rig.take(rig.save(), "A")["A"], ("A", 0, 6))


def test_a_failed_request_starts_clean_with_its_new_content(rig):
    rig.begin(new("Z", [2]))
    assert set(rig.run(new("A", [2, 3], hit=4, run=1)).failed) == {"A"}
    assert_rows(rig.run(replaced("A", [5], run=2, content="A2"))["A"], ("A2", 0, 2))


def test_a_hit_on_the_stale_hash_of_a_replaced_block_never_gets_the_new_contents_rows(rig):
    """faults.md, row 66: [1, 2, 3, 99] becomes [1, 2, 3, 7], and the block's hash still says 99."""
    rig.run(new("A", [1], run=4))
    assert_rows(rig.run(replaced("A", [1], hit=3, run=1, content="A2"))["A"], ("A", 0, 3), ("A2", 3, 4))
    taken = rig.run(new("D", [1, 2], hit=4, run=1), more("A", 1, blocks=[6]))
    assert isinstance(taken.failed["D"], HitRowsAbsentError)
    assert_rows(taken["A"], ("A2", 4, 5))


def test_a_private_block_is_open_to_a_hit_that_names_its_digest(rig):
    rig.run(new("A", [1], run=4))
    event = RequestEvent(RequestEventKind.REPLACED, "A", (1,), 3, 1, block_digests=(77,))
    rig.begin_as([event], replaced("A", [1], hit=3, run=1, content="A2"))
    rig.take(rig.save())
    for name, digest in (("D", 77), ("E", 99), ("F", 0)):
        told = RequestEvent(RequestEventKind.STARTED, name, (1, 8), 4, 1, block_digests=(digest, 0))
        rig.begin_as([told], new(name, [1, 8], hit=4, run=1))
        taken = rig.take(rig.save())
        if digest == 77:
            assert_rows(taken[name], ("A", 0, 3), ("A2", 3, 4), (name, 4, 5))
        else:
            assert isinstance(taken.failed[name], HitRowsAbsentError)


def test_a_private_block_is_free_for_everyone_once_it_changed_hands(rig):
    rig.run(new("A", [1], run=4))
    rig.run(replaced("A", [1], hit=3, run=1, content="A2"))
    rig.run(new("E", [1], run=4), finish=["A"])
    assert_rows(rig.run(new("D", [1, 2], hit=4, run=1))["D"], ("E", 0, 4), ("D", 4, 5))


@pytest.mark.parametrize(("expected", "served"), [(55, True), (0, True), (56, False)])
def test_a_hit_finds_rows_only_under_its_own_digest(rig, expected, served):
    rig.begin_as([RequestEvent(RequestEventKind.STARTED, "A", (1,), 0, 4, block_digests=(55,))], new("A", [1]))
    rig.take(rig.save())
    event = RequestEvent(RequestEventKind.STARTED, "C", (1, 2), 4, 1, block_digests=(expected, 0))
    rig.begin_as([event], new("C", [1, 2], hit=4, run=1))
    taken = rig.take(rig.save())
    if served:
        assert_rows(taken["C"], ("A", 0, 4), ("C", 4, 5))
    else:
        assert isinstance(taken.failed["C"], HitRowsAbsentError)


def test_the_digest_of_a_block_that_fills_up_later_counts_from_then_on(rig):
    rig.run(new("A", [1], run=3))
    rig.schedule(more("A", 1))
    rig.cache.new_step_starts(StepEvents(filled_blocks=(FilledBlock(1, (1 << 64) - 1),)))
    rig.take(rig.save())
    for name, digest, served in (("C", 12, False), ("D", (1 << 64) - 1, True)):
        event = RequestEvent(RequestEventKind.STARTED, name, (1, 2), 4, 1, block_digests=(digest, 0))
        rig.begin_as([event], new(name, [1, 2], hit=4, run=1))
        assert bool(rig.take(rig.save()).failed) is not served


def test_a_tenancy_the_cache_never_heard_of_is_not_served(rig):
    """vLLM under priority scheduling: blocks scheduled and taken back in one `schedule()`, their hash published."""
    rig.begin_as([RequestEvent(RequestEventKind.STARTED, "A", (1,), 0, 4, block_digests=(1001,))], new("A", [1]))
    rig.take(rig.save())
    event = RequestEvent(RequestEventKind.STARTED, "D", (1, 2), 4, 1, block_digests=(2002, 0))
    rig.begin_as([event], new("D", [1, 2], hit=4, run=1))
    assert isinstance(rig.take(rig.save()).failed["D"], HitRowsAbsentError)


def test_digests_that_do_not_fit_the_block_list_fail_the_request_alone(rig):
    event = RequestEvent(RequestEventKind.STARTED, "A", (1, 2), 0, 4, block_digests=(55,))
    rig.begin_as([event, RequestEvent(RequestEventKind.STARTED, "B", (3,), 0, 4)], new("A", [1]), new("B", [3]))
    taken = rig.take(rig.save())
    assert "2 blocks and 1 block_digests" in str(taken.failed["A"])
    assert_rows(taken["B"], ("B", 0, 4))


def test_the_old_contents_rows_behind_the_kept_prefix_are_gone_although_the_new_ones_never_came(rig):
    """The engine publishes the block under its new hash when it schedules the rows, and their forward is lost."""
    rig.run(new("A", [1, 2], run=8))
    event = RequestEvent(RequestEventKind.REPLACED, "A", (1,), 3, 1, block_digests=(77,))
    rig.begin_as([event], replaced("A", [1], hit=3, run=1, content="A2"))
    rig.begin(abort=["A"])
    told = RequestEvent(RequestEventKind.STARTED, "D", (1, 8), 4, 1, block_digests=(77, 0))
    rig.begin_as([told], new("D", [1, 8], hit=4, run=1))
    failed = rig.take(rig.save()).failed["D"]
    assert isinstance(failed, HitRowsAbsentError)
    assert "[(3, 4)]" in str(failed)
