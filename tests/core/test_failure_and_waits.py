# SPDX-License-Identifier: Apache-2.0
"""A failed write is sticky until `reset`, wakes everyone, leaves nothing held; every wait is bounded and names who."""

import pytest
from cache_rig import BRIEF_S, SHORT_S, more, new
from controlled_runtime import PATIENCE_S
from row_values import assert_rows

from omni_core.prefix_cache.errors import (
    CacheFailedError,
    HitRowsAbsentError,
    JoinTimeoutError,
    OmniPrefixCacheStagingTimeoutError,
    StepAlreadyDiscardedError,
    StepAlreadyMaterializedError,
)

BOOM = "page lost"


def fail_write(rig, *runs):
    """Save a step whose copy fails, and wait until the cache knows."""
    rig.backend.copy_gate.fail_next_copy(OSError(BOOM))
    step = rig.step(*runs)
    with pytest.raises(CacheFailedError, match=BOOM):
        rig.cache.flush()
    return step


def test_every_later_call_raises_the_first_failure_until_reset(make_rig):
    rig = make_rig(staging_depth=6)
    before = rig.step(new("B", [2]))
    rig.cache.flush()
    failed = fail_write(rig, new("A", [1]))
    for call in (
        lambda: rig.begin(more("A", 1, blocks=[3])),
        lambda: rig.save(),
        lambda: rig.take(before, "B"),
        lambda: rig.cache.discard_step(failed),
        lambda: rig.cache.flush(),
    ):
        with pytest.raises(CacheFailedError, match=rf"{BOOM}.*reset\(\)") as raised:
            call()
        assert isinstance(raised.value.__cause__.__cause__, OSError)
    # Calls that raised consumed their steps all the same.
    with pytest.raises(StepAlreadyMaterializedError):
        rig.take(before, "B")
    with pytest.raises(StepAlreadyDiscardedError):
        rig.cache.discard_step(failed)
    rig.assert_nothing_held()
    report = rig.cache.reset()
    assert BOOM in report.failure_cleared
    taken = rig.run(new("D", [1, 4], hit=4), new("E", [5]))
    assert isinstance(taken.failed["D"], HitRowsAbsentError)
    assert_rows(taken["E"], ("E", 0, 4))


def test_misuse_stays_misuse_on_a_failed_cache(rig):
    step = rig.run(new("B", [2])).step_id
    fail_write(rig, new("A", [1]))
    with pytest.raises(StepAlreadyMaterializedError):
        rig.take(step, "B")


def test_a_failure_wakes_every_kind_of_waiter(make_rig):
    rig = make_rig(staging_depth=3)
    rig.backend.copy_gate.fail_next_copy(OSError(BOOM))
    with rig.held():
        first = rig.step(new("A", [1]))
        second = rig.step(new("C", [1, 2], hit=4))
        rig.step(new("E", [5]))
        calls = [rig.taking(first, "A", thread="taker-1"), rig.taking(second, "C", thread="taker-2")]
        rig.begin(new("F", [6]))
        calls += [rig.call("saver", rig.save), rig.call("flusher", rig.cache.flush)]
        for call in calls:
            rig.runtime.wait_until_waiting(call.name)
    for call in calls:
        with pytest.raises(CacheFailedError, match=BOOM):
            call.result()
    rig.cache.reset()
    rig.assert_nothing_held()


def test_a_waiter_that_wakes_only_after_the_reset_is_told_so(rig):
    """Failure and reset may both pass before a waiter gets to run; it must neither hang nor deliver."""
    rig.backend.copy_gate.fail_next_copy(OSError(BOOM))
    with rig.held():
        step = rig.step(new("A", [1]))
        taker = rig.taking(step, "A")
        with rig.runtime.keep_asleep("taker"):
            rig.backend.copy_gate.release_copies()
            with pytest.raises(CacheFailedError):
                rig.cache.flush()
            rig.cache.reset()
            assert_rows(rig.run(new("B", [1]))["B"], ("B", 0, 4))
    with pytest.raises(CacheFailedError, match="reset while it waited"):
        taker.result(timeout_s=5)
    rig.assert_nothing_held()


def test_a_failure_while_a_rescue_is_flagged_holds_nobody_back(rig):
    rig.run(new("A", [1]))
    with rig.runtime.stop_at("prefetch.landed") as before_gather:
        hit = rig.step(new("C", [1, 2], hit=4))
        before_gather.wait_reached()
        rig.cache.flush()
        with rig.held():
            rig.backend.copy_gate.fail_next_copy(OSError(BOOM))
            rig.step(new("E", [1]), finish=["A", "C"])
            taker = rig.taking(hit, "C")
        with pytest.raises(CacheFailedError, match=BOOM):
            taker.result()
    rig.cache.reset()
    rig.assert_nothing_held()


def test_after_a_failure_and_reset_the_threads_work_on(make_rig):
    rig = make_rig(staging_depth=2)
    for number in range(5):
        fail_write(rig, new("A", [1]))
        rig.cache.reset()
        writer, reader = f"r{2 * number}", f"r{2 * number + 1}"
        taken = rig.run(new(writer, [1]), new(reader, [1, 2], hit=4))
        assert_rows(taken[reader], (writer, 0, 4), (reader, 4, 8))
        rig.assert_nothing_held()
        rig.begin(finish=[writer, reader])


def test_a_failed_step_of_several_queued_fails_them_all(make_rig):
    rig = make_rig(staging_depth=4)
    rig.backend.copy_gate.fail_next_copy(OSError(BOOM))
    with rig.held():
        steps = [rig.step(new("A", [1])), rig.step(new("B", [2])), rig.step(new("C", [3]))]
    for step, req_id in zip(steps, "ABC", strict=True):
        with pytest.raises(CacheFailedError, match=BOOM):
            rig.take(step, req_id)
    rig.cache.reset()
    taken = rig.run(new("D", [2, 4], hit=4), new("E", [3, 5], hit=4))
    assert set(taken.failed) == {"D", "E"}


def test_an_unsaved_steps_reads_end_with_the_call_that_raises(rig):
    rig.run(new("A", [1]))
    rig.cache.flush()
    with rig.held():
        rig.backend.copy_gate.fail_next_copy(OSError(BOOM))
        rig.step(new("B", [2]))
        rig.begin(new("C", [1, 3], hit=4))
        assert rig.cache.stats().pinned_slots == 4
    with pytest.raises(CacheFailedError):
        rig.cache.flush()
    with pytest.raises(CacheFailedError):
        rig.save()
    assert rig.cache.stats().pinned_slots == 0
    assert rig.cache.stats().live_reads == 0


# -- bounded waits


def test_a_copy_that_never_ends_is_a_failure_that_names_it(make_rig):
    rig = make_rig(join_timeout_s=BRIEF_S)
    with rig.held():
        step = rig.step(new("A", [1]))
        with pytest.raises(CacheFailedError, match=f"timeout_s={BRIEF_S}.*copies are held"):
            rig.cache.flush(PATIENCE_S)
        with pytest.raises(CacheFailedError):
            rig.take(step, "A")
    rig.cache.reset()
    assert_rows(rig.run(new("B", [1]))["B"], ("B", 0, 4))


def test_flush_is_bounded_and_names_the_writes_under_way(rig):
    with rig.held():
        first = rig.step(new("A", [1]))
        second = rig.step(new("B", [2]))
        with pytest.raises(
            JoinTimeoutError, match=rf"write of step {first} .*COPYING.*write of step {second} .*QUEUED"
        ):
            rig.cache.flush(timeout_s=SHORT_S)
    rig.cache.flush()
    for step, req_id in ((first, "A"), (second, "B")):
        assert_rows(rig.take(step, req_id)[req_id], (req_id, 0, 4))


def test_staging_wait_names_the_writes_that_hold_it(make_rig):
    rig = make_rig(staging_depth=2, staging_claim_timeout_s=SHORT_S)
    with rig.held():
        for req_id in "AB":
            rig.cache.discard_step(rig.step(new(req_id, [ord(req_id) - 64])))
        rig.begin(new("C", [3]))
        with pytest.raises(
            OmniPrefixCacheStagingTimeoutError,
            match=r"unread steps \(none\) and writes \(write of step 1 .*write of step 2 .*staging_depth",
        ):
            rig.save()
    rig.cache.flush()
    assert_rows(rig.take(rig.save())["C"], ("C", 0, 4))


def test_a_take_that_gives_up_leaves_the_others_whole(make_rig):
    rig = make_rig(join_timeout_s=BRIEF_S)
    with rig.runtime.stop_at("committer.host_ready") as busy:
        first = rig.step(new("A", [1]))
        busy.wait_reached()
        second = rig.step(new("B", [2]))
        with pytest.raises(JoinTimeoutError, match=f"step {second}: .*QUEUED"):
            rig.take(second, "B")
        assert_rows(rig.take(first, "A")["A"], ("A", 0, 4))
    rig.assert_nothing_held()


def test_a_step_saved_while_the_queue_waits_gets_its_slot_when_a_step_is_taken(make_rig):
    rig = make_rig(staging_depth=1)
    first = rig.step(new("A", [1]))
    rig.cache.flush()
    rig.begin(new("B", [2]))
    saver = rig.call("saver", rig.save)
    rig.runtime.wait_until_waiting("saver")
    assert_rows(rig.take(first, "A")["A"], ("A", 0, 4))
    assert_rows(rig.take(saver.result(), "B")["B"], ("B", 0, 4))
