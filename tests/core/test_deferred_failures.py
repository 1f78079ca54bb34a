# SPDX-License-Identifier: Apache-2.0
"""What a deferred copy that fails, hangs or is dropped leaves behind: a named error, and nothing that is held twice."""

import pytest
from cache_rig import BRIEF_S, SHORT_S, more, new
from controlled_runtime import PATIENCE_S, ControlledRuntime
from deferred_rig import CHUNK_BYTES, MEL, DeferredRig, assert_both, assert_mel, deferred_rigs
from operation_counts import WatchedRuntime

from omni_core.prefix_cache.errors import (
    CacheClosedError,
    CacheFailedError,
    HitRowsAbsentError,
    JoinTimeoutError,
    OmniPrefixCacheStagingTimeoutError,
    StepOrderError,
)
from omni_core.prefix_cache.policy import ModelCachePolicy

BOOM = "ring lost"


@pytest.fixture
def make_rig():
    with deferred_rigs() as make:
        yield make


@pytest.fixture
def rig(make_rig):
    return make_rig()


class Uncopyable:
    def __copy__(self):
        raise TypeError("cannot be copied")


def wait_on_device(rig, *runs):
    """A step whose page is over and whose deferred rows are on the device."""
    rig.discard(rig.step(*runs))
    rig.settle()
    assert rig.on_device()[0] > 0


def assert_serves(rig, writer="M", reader="N"):
    """The cache stores and joins as ever."""
    rig.discard(rig.step(new(writer, [8])))
    assert_both(rig.run(new(reader, [8, 9], hit=4), finish=[writer])[reader], (writer, 0, 4), (reader, 4, 8))
    rig.begin(finish=[reader])


# -- failure


def test_a_failed_deferred_copy_is_sticky_and_reset_gives_everything_back(rig):
    wait_on_device(rig, new("A", [1]))
    wait_on_device(rig, new("B", [2]))
    rig.backend.copy_gate.fail_next_copy(OSError(BOOM))
    with pytest.raises(CacheFailedError, match=rf"{BOOM}.*reset\(\)") as raised:
        rig.cache.flush()
    assert isinstance(raised.value.__cause__.__cause__, OSError)
    for call in (rig.save, rig.begin, rig.cache.flush):
        with pytest.raises(CacheFailedError, match=BOOM):
            call()
    assert BOOM in rig.cache.reset().failure_cleared
    assert rig.runtime.comes_true(lambda: rig.on_device() == (0, 0, 0))
    taken = rig.run(new("C", [1, 3], hit=4))
    assert isinstance(taken.failed["C"], HitRowsAbsentError)
    assert_serves(rig)
    rig.assert_nothing_held()


def test_records_still_waiting_when_a_write_fails_are_dropped_by_the_reset(rig):
    wait_on_device(rig, new("A", [1]))
    rig.backend.copy_gate.fail_next_copy(OSError(BOOM))
    step = rig.step(new("B", [2]))
    rig.settle()
    with pytest.raises(CacheFailedError, match=BOOM):
        rig.take(step, "B")
    assert rig.on_device() == (2, 2 * CHUNK_BYTES, 2)
    rig.cache.reset()
    assert rig.on_device() == (0, 0, 0)
    assert_serves(rig)


def test_a_failed_copy_into_the_page_wakes_whoever_waits_for_it(rig):
    with rig.held():
        step = rig.step(new("A", [1]))
        hit = rig.step(new("C", [1, 2], hit=4))
        takers = [rig.taking(step, "A", thread="taker-1"), rig.taking(hit, "C", thread="taker-2")]
        rig.backend.copy_gate.fail_next_copy(OSError("page lost"))
        rig.backend.copy_gate.let_through(1)
        rig.backend.copy_gate.release_copies()
    for taker in takers:
        with pytest.raises(CacheFailedError, match="page lost"):
            taker.result()
    rig.cache.reset()
    rig.assert_nothing_held()
    assert rig.runtime.comes_true(lambda: rig.on_device() == (0, 0, 0))
    assert_serves(rig)


def test_of_several_records_in_a_task_those_landed_before_the_failure_hold_nothing(rig):
    for number, req_id in enumerate("ABD"):
        wait_on_device(rig, new(req_id, [number + 1]))
    with rig.runtime.stop_at("committer.deferred_landed") as landed:
        rig.begin(finish=["D"])
        landed.wait_reached()
        rig.backend.copy_gate.fail_next_copy(OSError(BOOM))
        landed.open()
    with pytest.raises(CacheFailedError, match=BOOM):
        rig.cache.flush()
    rig.cache.reset()
    assert rig.runtime.comes_true(lambda: rig.on_device() == (0, 0, 0))
    # Both bounce buffers are there again: three records in one task need each of them.
    for number in range(3):
        rig.discard(rig.step(new(f"r{number}", [number + 1])))
    rig.cache.flush()
    assert_both(rig.run(new("C", [3, 9], hit=4))["C"], ("r2", 0, 4), ("C", 4, 8))


class FailingAt(ControlledRuntime):
    """Whoever first passes the checkpoint named in `fails_at` gets an error there."""

    fails_at = None

    def checkpoint(self, name):
        if name == self.fails_at:
            self.fails_at = None
            raise MemoryError(BOOM)
        super().checkpoint(name)


@pytest.mark.parametrize(
    "station",
    ["committer.deferred_copying", "committer.deferred_copied", "committer.write", "committer.deferred_landed"],
)
@pytest.mark.parametrize("step_open", [True, False])
def test_wherever_a_record_fails_page_bounce_and_room_come_back(make_rig, station, step_open):
    rig = make_rig(runtime=FailingAt(), staging_depth=3)
    for number, req_id in enumerate("AB"):
        step = rig.step(new(req_id, [number + 1]))
        rig.settle()
        _ = step_open or rig.discard(step)
    rig.runtime.fails_at = station
    with pytest.raises(CacheFailedError, match=BOOM):
        rig.cache.flush()
    rig.cache.reset()
    assert rig.runtime.comes_true(lambda: rig.on_device() == (0, 0, 0))
    rig.assert_nothing_held()
    # Three records in one task, without a page: both bounce buffers are needed.
    for number in range(3):
        rig.discard(rig.step(new(f"r{number}", [number + 1])))
    rig.cache.flush()
    assert_both(rig.run(new("C", [3, 9], hit=4))["C"], ("r2", 0, 4), ("C", 4, 8))


# -- copies that hang: what they read and write is not used by anyone else


def test_a_hanging_copy_keeps_its_device_bytes_charged_until_it_ends(make_rig):
    rig = make_rig(budget_bytes=2 * CHUNK_BYTES, join_timeout_s=BRIEF_S)
    wait_on_device(rig, new("A", [1]))
    with rig.held():
        with pytest.raises(CacheFailedError, match=f"timeout_s={BRIEF_S}.*copies are held"):
            rig.cache.flush(PATIENCE_S)
        rig.cache.reset()
        assert rig.on_device() == (1, CHUNK_BYTES, 0)
        # Two chunks do not fit beside it, one does.
        rig.begin(new("B", [2, 3], run=8))
        rig.save()
        assert rig.on_device() == (1, CHUNK_BYTES, 0)
        rig.step(new("D", [4]))
        assert rig.on_device()[:2] == (2, 2 * CHUNK_BYTES)
    rig.cache.flush()
    assert rig.runtime.comes_true(lambda: rig.on_device() == (0, 0, 0))
    assert_both(rig.run(new("C", [2, 3, 5], hit=8))["C"], ("B", 0, 8), ("C", 8, 12))


def test_a_hanging_copy_keeps_its_bounce_buffer_until_it_ends(make_rig):
    """Both buffers are busy: a later record waits for one of them instead of writing into it."""
    rig = make_rig(needs_full_hidden_states=False, join_timeout_s=BRIEF_S)
    for req_id, blocks in (("A", [1, 2, 3, 5]), ("B", [4])):
        rig.discard(rig.step(new(req_id, blocks, run=4 * len(blocks)), hidden=None))
    rig.settle()
    with rig.held():
        with pytest.raises(CacheFailedError):
            rig.cache.flush(PATIENCE_S)
        rig.cache.reset()
        rig.discard(rig.step(new("D", [6]), hidden=None))
        rig.begin(finish=["D"])
        rig.wait_until_copying()
        assert rig.copies() == 2, "D's is not begun"
    rig.cache.flush(PATIENCE_S)
    assert rig.copies() == 3
    assert_mel(rig.run(new("C", [6, 7], hit=4), hidden=None)["C"], ("D", 0, 4), ("C", 4, 8))
    assert rig.runtime.comes_true(lambda: rig.on_device() == (0, 0, 0))


def test_a_record_that_gets_no_bounce_buffer_in_time_fails_by_name(make_rig):
    rig = make_rig(join_timeout_s=SHORT_S, needs_full_hidden_states=False)
    for number, req_id in enumerate("AB"):
        rig.discard(rig.step(new(req_id, [number + 1]), hidden=None))
    rig.settle()
    with rig.held():
        with pytest.raises(CacheFailedError):
            rig.cache.flush(PATIENCE_S)
        rig.cache.reset()
        step = rig.step(new("D", [6]), hidden=None)
        rig.discard(step)
        with pytest.raises(
            CacheFailedError, match=rf"deferred rows of step {step}: no bounce buffer.*join_timeout_s={SHORT_S}.*step 1"
        ):
            rig.cache.flush(PATIENCE_S)
    rig.cache.reset()
    assert rig.runtime.comes_true(lambda: rig.on_device() == (0, 0, 0))


def test_a_hanging_copy_keeps_its_page_until_it_ends(make_rig):
    rig = make_rig(
        needs_full_hidden_states=False, staging_depth=1, staging_claim_timeout_s=SHORT_S, join_timeout_s=BRIEF_S
    )
    with rig.held():
        rig.step(new("A", [1]), hidden=None)
        with pytest.raises(CacheFailedError):
            rig.cache.flush(PATIENCE_S)
        rig.cache.reset()
        assert rig.cache.stats().open_steps == 0
        rig.begin(new("B", [2]))
        with pytest.raises(OmniPrefixCacheStagingTimeoutError, match="nobody wants, still running into staging slot 0"):
            rig.save(hidden=None)
    assert rig.runtime.comes_true(lambda: rig.cache.stats().staging_slots_in_use == 0)
    assert_mel(rig.take(rig.save(hidden=None), "B")["B"], ("B", 0, 4))


# -- saves that do not come about


def test_a_save_that_raises_gives_its_room_on_the_device_back(rig):
    for _ in range(3):
        rig.begin(new("A", [1]))
        with pytest.raises(TypeError, match="cannot be copied"):
            rig.save({"odd": Uncopyable()})
        assert rig.on_device() == (0, 0, 0)
    rig.begin(finish=["A"])
    assert_serves(rig)


def test_a_save_that_finds_the_cache_reset_gives_its_room_back(rig):
    with rig.runtime.stop_at("save_outputs.recorded") as recorded:
        rig.begin(new("A", [1]))
        saver = rig.call("saver", rig.save)
        recorded.wait_reached()
        assert rig.on_device() == (1, CHUNK_BYTES, 0)
        rig.cache.reset()
        recorded.open()
        with pytest.raises(StepOrderError, match="reset meanwhile"):
            saver.result()
    assert rig.on_device() == (0, 0, 0)
    assert_serves(rig)


def test_a_save_that_finds_the_cache_failed_gives_its_room_back(make_rig):
    rig = make_rig(join_timeout_s=PATIENCE_S)
    wait_on_device(rig, new("A", [1]))
    with rig.runtime.stop_at("save_outputs.recorded") as recorded:
        rig.begin(new("B", [2]))
        saver = rig.call("saver", rig.save)
        recorded.wait_reached()
        assert rig.runtime.comes_true(lambda: rig.backend.copy_gate.admitted == 2)
        rig.backend.copy_gate.fail_next_copy(OSError(BOOM))
        with pytest.raises(CacheFailedError, match=BOOM):
            rig.cache.flush()
        recorded.open()
        with pytest.raises(CacheFailedError, match=BOOM):
            saver.result()
    rig.cache.reset()
    assert rig.runtime.comes_true(lambda: rig.on_device() == (0, 0, 0))
    assert_serves(rig)


# -- reset and close


def test_a_reset_drops_what_is_on_the_device(rig):
    wait_on_device(rig, new("A", [1]), new("B", [2]))
    rig.step(new("D", [3]))
    report = rig.cache.reset()
    assert report.rows_cleared[MEL] == 12
    assert rig.on_device() == (0, 0, 0)
    assert rig.copies() == 0
    taken = rig.run(new("C", [1, 4], hit=4), new("E", [5]))
    assert isinstance(taken.failed["C"], HitRowsAbsentError)
    assert_both(taken["E"], ("E", 0, 4))
    # A's end says nothing about a record that is gone, and its id begins anew.
    rig.begin(finish=["A"])
    assert_serves(rig, writer="A")


def test_a_reset_waits_for_the_deferred_copy_under_way_and_drops_the_rest(rig):
    wait_on_device(rig, new("A", [1]))
    wait_on_device(rig, new("B", [2]))
    with rig.held():
        rig.begin(finish=["A"])
        rig.wait_until_copying()
        rig.begin(finish=["B"])
        resetter = rig.call("resetter", rig.cache.reset)
        rig.runtime.wait_until_waiting("resetter")
        assert not resetter.done
    assert resetter.result().writes_dropped == 1
    assert rig.on_device() == (0, 0, 0)
    assert rig.copies() == 1
    assert_serves(rig)


def test_a_close_drops_what_is_on_the_device():
    rig = DeferredRig()
    wait_on_device(rig, new("A", [1]))
    rig.stop()
    assert rig.copies() == 0
    assert rig.on_device() == (0, 0, 0)


def test_a_policy_for_a_closed_cache_is_refused_and_allocates_nothing():
    rig = DeferredRig()
    rig.stop()
    with pytest.raises(CacheClosedError, match="register_policy"):
        rig.cache.register_policy(ModelCachePolicy(deferred_keys={MEL}))
    assert rig.backend.device_bytes == 0


def test_a_close_lands_what_was_forced_and_leaves_memory_mapped_while_a_copy_runs():
    rig = DeferredRig()
    wait_on_device(rig, new("A", [1]))
    with rig.held():
        rig.begin(finish=["A"])
        rig.wait_until_copying()
        assert rig.call("closer", lambda: rig.cache.close(SHORT_S)).result() is False
        assert rig.backend.device_bytes > rig.config.staging_depth * rig.config.staging_arena_bytes
    rig.stop()
    assert rig.copies() == 1


# -- waits that end, and whom they name


def test_a_staging_wait_names_the_deferred_writes_on_the_device(make_rig):
    rig = make_rig(staging_depth=2, staging_claim_timeout_s=SHORT_S)
    steps = [rig.step(new("A", [1, 2], run=4)), rig.step(more("A", 4), new("B", [3]))]
    rig.settle()
    rig.begin(new("C", [4]))
    with pytest.raises(
        OmniPrefixCacheStagingTimeoutError,
        match=r"unread steps \(step 1, step 2\).*deferred write 1 of request 'A' \(PENDING\), "
        r"deferred write 1 of request 'B' \(PENDING\)",
    ):
        rig.save()
    assert_both(rig.take(steps[0], "A")["A"], ("A", 0, 4))
    rig.take(rig.save(), "C")


def test_an_error_names_a_few_open_writes_and_counts_the_others(make_rig):
    rig = make_rig(staging_depth=1, staging_claim_timeout_s=SHORT_S)
    rig.step(*(new(f"r{number}", [number + 1], run=1) for number in range(12)))
    rig.begin(new("C", [14]))
    with pytest.raises(OmniPrefixCacheStagingTimeoutError, match=r"'r7' \(PENDING\), and 4 more\)"):
        rig.save()


def test_a_take_that_gives_up_names_the_record_and_leaves_the_others_whole(make_rig):
    rig = make_rig(join_timeout_s=BRIEF_S)
    with rig.runtime.stop_at("committer.deferred_copied") as busy:
        wait_on_device(rig, new("A", [1]))
        rig.begin(finish=["A"])
        busy.wait_reached()
        step = rig.step(new("B", [2]))
        with pytest.raises(
            JoinTimeoutError,
            match=rf"step {step}: .*write of step {step} .*QUEUED.*"
            rf"deferred records, for materialize of step {step} \(1 record\) .*QUEUED",
        ):
            rig.take(step, "B")
    rig.cache.flush()
    assert_both(rig.run(new("C", [2, 3], hit=4))["C"], ("B", 0, 4), ("C", 4, 8))
    rig.assert_nothing_held()


def test_flush_names_open_steps_and_the_deferred_writes_under_way(rig):
    with rig.held():
        step = rig.step(new("A", [1]))
        rig.begin(finish=["A"])
        with pytest.raises(
            JoinTimeoutError,
            match=rf"unread steps \(step {step}\).*COPYING.*deferred write 1 of request 'A' \(1 record\) .*QUEUED",
        ):
            rig.cache.flush(SHORT_S)
    assert_both(rig.take(step, "A")["A"], ("A", 0, 4))


# -- locks


def test_no_thread_computes_waits_or_takes_a_lock_while_it_holds_one(make_rig):
    runtime = WatchedRuntime()
    with runtime.watched():
        rig = make_rig(runtime=runtime, budget_bytes=3 * CHUNK_BYTES)
        for number in range(6):
            step = rig.step(new(f"r{number}", [number + 1]), finish=[f"r{number - 1}"] if number % 2 else [])
            rig.take(step).release() if number % 3 else rig.discard(step)
        rig.run(new("C", [6, 7], hit=4))
        rig.step(new("D", [8, 9], hit=2, run=2), copies=[(6, 8)])
        rig.cache.flush()
        rig.cache.stats()
        rig.step(new("E", [10]))
        rig.cache.reset()
    assert runtime.breaches == []
