# SPDX-License-Identifier: Apache-2.0
"""Rows of steps that were discarded, or not asked for, come with a later step, or are reported when there is none."""

import pytest
import torch
from cache_rig import BRIEF_S, more, new
from controlled_runtime import PATIENCE_S
from row_values import assert_rows, row_values

from omni_core.prefix_cache.errors import HitRowsAbsentError, JoinTimeoutError, ReadFailedError
from omni_core.prefix_cache.outputs import PartialRequest
from omni_core.prefix_cache.policy import ModelCachePolicy

CODES = {"codes": ((4,), torch.int64)}


def test_rows_of_a_discarded_step_come_with_the_next_one(make_rig):
    rig = make_rig(keys=CODES)
    rig.cache.discard_step(rig.step(new("A", [1, 2], run=5), new("B", [3], run=2)))
    taken = rig.run(more("A", 2), more("B", 1))
    assert_rows(taken["A"], ("A", 0, 7))
    assert_rows(taken["A"], ("A", 0, 7), key="codes", trailing=(4,), dtype=torch.int64)
    assert_rows(taken["B"], ("B", 0, 3))
    assert_rows(rig.run(more("A", 1))["A"], ("A", 7, 8))


def test_a_hit_of_a_discarded_step_comes_with_the_next_one(rig):
    rig.run(new("A", [1, 2], run=8))
    rig.cache.discard_step(rig.step(new("C", [1, 2, 3], hit=8, run=2)))
    assert_rows(rig.run(more("C", 1))["C"], ("A", 0, 8), ("C", 8, 11))


def test_rows_not_asked_for_come_with_a_later_step(rig):
    rig.run(new("Z", [9]))
    step = rig.step(new("A", [1]), new("C", [9, 2], hit=4))
    assert list(rig.take(step, "A")) == ["A"]
    taken = rig.run(more("A", 1, blocks=[3]), more("C", 1, blocks=[4]))
    assert_rows(taken["A"], ("A", 4, 5))
    assert_rows(taken["C"], ("Z", 0, 4), ("C", 4, 9))


def test_an_empty_take_consumes_the_step_and_owes_its_rows(rig):
    step = rig.step(new("A", [1]))
    outputs = rig.cache.materialize(step, [])
    assert list(outputs) == []
    assert outputs.failed == {}
    assert_rows(rig.run(more("A", 1, blocks=[2]))["A"], ("A", 0, 5))


def test_what_is_missing_need_not_be_one_range(rig):
    first = rig.step(new("A", [1, 2, 3], run=2))
    assert_rows(rig.run(more("A", 2))["A"], ("A", 2, 4))
    third = rig.step(more("A", 3))
    fourth = rig.step(more("A", 1))
    rig.cache.discard_step(third)
    rig.cache.discard_step(first)
    assert_rows(rig.take(fourth, "A")["A"], ("A", 7, 8))
    rows = rig.run(more("A", 1))["A"]
    assert rows.ranges == ((0, 2), (4, 7), (8, 9))
    assert rows.num_rows == 6
    assert_rows(rows, ("A", 0, 2), ("A", 4, 7), ("A", 8, 9))


def test_a_step_that_is_discarded_with_owed_rows_gives_them_back(rig):
    rig.cache.discard_step(rig.step(new("A", [1, 2], run=3)))
    rig.cache.discard_step(rig.step(more("A", 2)))
    rig.take(rig.step(more("A", 1), new("B", [3])), "B")
    assert_rows(rig.run(more("A", 1))["A"], ("A", 6, 7))
    assert_rows(rig.run(more("A", 1))["A"], ("A", 0, 6), ("A", 7, 8))


def test_what_nobody_takes_is_not_read_again_with_every_step(rig):
    rig.cache.discard_step(rig.step(new("A", [1, 2, 3], run=2)))
    for _ in range(6):
        rig.cache.discard_step(rig.step(more("A", 1)))
    step = rig.step(more("A", 1))
    assert rig.cache.stats().live_reads == 0
    assert_rows(rig.take(step, "A")["A"], ("A", 8, 9))
    assert_rows(rig.run(more("A", 1))["A"], ("A", 0, 8), ("A", 9, 10))


def test_an_owed_row_whose_block_changed_hands_is_absent_and_not_the_next_tenants(rig):
    rig.cache.discard_step(rig.step(new("A", [1, 2], run=5)))
    rig.run(new("E", [1]))
    failed = rig.run(more("A", 1)).failed["A"]
    assert isinstance(failed, HitRowsAbsentError)
    assert "(0, 4)" in str(failed)


def test_rows_of_a_hit_whose_step_was_never_saved_come_with_the_step_that_is(rig):
    rig.run(new("A", [1]))
    rig.begin(new("C", [1, 2], hit=4))
    rig.begin(more("C", 2, at=4))
    assert_rows(rig.take(rig.save())["C"], ("A", 0, 4), ("C", 4, 6))


def test_owed_rows_that_were_never_stored_are_absent_and_not_some_other_slots(rig):
    rig.run(new("Z", [15]))
    rig.begin(new("A", [1]))
    layout = rig.layout()
    layout.slots[1] = -1
    rig.cache.discard_step(rig.save(layout=layout))
    taken = rig.run(more("A", 1, blocks=[2]))
    assert isinstance(taken.failed["A"], HitRowsAbsentError)
    assert "[(1, 2)]" in str(taken.failed["A"])


def test_an_ended_request_with_rows_never_delivered_is_reported_once_with_its_ranges(rig):
    rig.run(new("Z", [9]))
    rig.cache.discard_step(rig.step(new("A", [1, 2], run=5), new("B", [3], run=2), new("C", [9, 4], hit=4, run=1)))
    rig.run(more("B", 1))
    open_step = rig.step(more("A", 1))
    rig.begin(finish=["A", "B"], abort=["C"])
    assert rig.cache.take_partial_requests() == (PartialRequest("C", ((0, 5),)),)
    # A's missing rows had moved into its open step and come with it.
    assert_rows(rig.take(open_step, "A")["A"], ("A", 0, 6))
    assert rig.cache.take_partial_requests() == ()


def test_a_step_discarded_after_its_request_ended_is_reported(rig):
    rig.run(new("A", [1, 2], run=3))
    step = rig.step(more("A", 2))
    rig.begin(finish=["A"])
    assert rig.cache.take_partial_requests() == ()
    rig.cache.discard_step(step)
    assert rig.cache.take_partial_requests() == (PartialRequest("A", ((3, 5),)),)


@pytest.mark.parametrize("ended_first", [False, True])
@pytest.mark.parametrize("consume", ["take", "discard"])
def test_a_request_that_failed_is_no_partial_one_whenever_its_step_is_consumed(rig, ended_first, consume):
    step = rig.step(new("C", [1, 2], hit=4), new("A", [3]))
    if ended_first:
        rig.begin(finish=["C"])
    if consume == "take":
        assert set(rig.take(step, "A", "C").failed) == {"C"}
    else:
        rig.cache.discard_step(step)
    if not ended_first:
        rig.begin(finish=["C"])
    assert rig.cache.take_partial_requests() == ()


def test_what_an_ended_request_misses_is_one_report(rig):
    rig.run(new("A", [1]))
    first = rig.step(new("C", [1, 2, 3], hit=4, run=3))
    second = rig.step(more("C", 2))
    rig.begin(finish=["C"])
    rig.cache.discard_step(second)
    rig.cache.discard_step(first)
    assert rig.cache.take_partial_requests() == (PartialRequest("C", ((0, 9),)),)


def test_reports_beyond_the_limit_drop_the_oldest(make_rig):
    rig = make_rig(max_partial_reports=2)
    for number in range(4):
        rig.cache.discard_step(rig.step(new(f"r{number}", [1], run=2)))
        rig.begin(finish=[f"r{number}"])
    assert [report.req_id for report in rig.cache.take_partial_requests()] == ["r2", "r3"]


def test_rows_of_a_step_that_was_not_ready_in_time_stay_owed(make_rig):
    rig = make_rig(join_timeout_s=BRIEF_S)
    with rig.runtime.stop_at("committer.host_ready") as busy:
        rig.cache.discard_step(rig.step(new("B", [9])))
        busy.wait_reached()
        step = rig.step(new("A", [1]))
        with pytest.raises(JoinTimeoutError, match=rf"step {step}: .*join_timeout_s={BRIEF_S}.*QUEUED"):
            rig.take(step, "A")
    rig.cache.flush(PATIENCE_S)
    last = rig.step(more("A", 1, blocks=[2]))
    rig.cache.flush(PATIENCE_S)
    assert_rows(rig.take(last, "A")["A"], ("A", 0, 5))
    rig.assert_nothing_held()


def test_rows_that_could_not_be_read_in_time_stay_owed(make_rig):
    rig = make_rig(join_timeout_s=BRIEF_S)
    rig.run(new("A", [1]))
    rig.cache.flush(PATIENCE_S)
    with rig.runtime.stop_at("prefetch.landed"):
        taken = rig.run(new("C", [1, 2], hit=4), new("D", [3]))
        assert isinstance(taken.failed["C"], ReadFailedError)
        assert f"join_timeout_s={BRIEF_S}" in str(taken.failed["C"])
        assert_rows(taken["D"], ("D", 0, 4))
    last = rig.step(more("C", 1, blocks=[4]))
    assert_rows(rig.take(last, "C")["C"], ("A", 0, 4), ("C", 4, 9))


def test_leftover_rows_of_a_policy_without_hidden_rows_name_their_own_range(make_rig):
    rig = make_rig(policy=ModelCachePolicy(needs_full_hidden_states=False), keys=CODES)
    rig.cache.discard_step(rig.step(new("A", [1], run=3)))
    rows = rig.run(more("A", 1))["A"]
    assert rows.ranges == ((0, 4),)
    assert_rows(rows, ("A", 0, 4), key="codes", trailing=(4,), dtype=torch.int64)
    # Hidden rows are not stored by this policy: those of the discarded step are gone, and the range says so.
    assert rows.ranges_of("__hidden_states__") == ((3, 4),)
    assert torch.equal(rows.hidden_states, row_values("A", [3]))


def test_counters_tell_hit_rows_from_computed_ones(rig):
    rig.run(new("A", [1, 2], run=8))
    rig.run(new("C", [1, 2, 3], hit=8, run=2))
    rig.cache.discard_step(rig.step(more("C", 1)))
    rig.run(more("C", 1))
    stats = rig.cache.stats()
    assert (stats.steps_saved, stats.steps_materialized, stats.steps_discarded) == (4, 3, 1)
    assert stats.rows_delivered == 8 + 10 + 2
    assert stats.rows_from_hits == 8 + 1
