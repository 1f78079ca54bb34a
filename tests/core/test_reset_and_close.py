# SPDX-License-Identifier: Apache-2.0
"""`reset` forgets and reports; `close` ends everything, in bounded time, whatever is under way."""

import gc
import mmap
from pathlib import Path

import pytest
import torch
from cache_rig import BRIEF_S, SHORT_S, CacheRig, more, new
from controlled_runtime import ControlledRuntime
from omni_core_cpu_sim import CpuSimBackend
from row_values import assert_rows

from omni_core.backend.memory import tensor_nbytes
from omni_core.prefix_cache.config import HIDDEN_KEY
from omni_core.prefix_cache.errors import (
    CacheClosedError,
    CacheFailedError,
    HitRowsAbsentError,
    JoinTimeoutError,
    RequestNotStartedError,
    StepAlreadyDiscardedError,
    StepOrderError,
)
from omni_core.prefix_cache.policy import ModelCachePolicy


def test_a_reset_reports_what_it_cleared(make_rig):
    rig = make_rig(keys={"codes": ((4,), torch.int64)})
    rig.run(new("A", [1, 2], run=6), new("B", [3], run=2))
    rig.run(more("A", 1), keys=())
    rig.step(more("B", 1))
    rig.cache.flush()
    report = rig.cache.reset()
    assert report.rows_cleared == {HIDDEN_KEY: 10, "codes": 9}
    assert (report.requests_forgotten, report.steps_dropped, report.writes_dropped) == (2, 1, 0)
    assert report.bytes_cleared == 10 * 3 * 4 + 9 * 4 * 8
    assert report.deferred_records_dropped == 0
    assert report.failure_cleared is None
    report = rig.cache.reset()
    assert report.rows_cleared == {HIDDEN_KEY: 0, "codes": 0}
    assert (report.requests_forgotten, report.steps_dropped) == (0, 0)


def test_a_reset_counts_steps_whose_deferred_rows_were_on_the_device(make_rig):
    rig = make_rig(
        keys={"late": ((2,), torch.float32)},
        policy=ModelCachePolicy(deferred_keys={"late"}),
        device_staging_bytes=1 << 12,
    )
    for req_id, block in (("A", 1), ("B", 2)):
        rig.step(new(req_id, [block]))
    assert rig.cache.reset().deferred_records_dropped == 2
    assert rig.cache.stats().deferred_bytes == 0


def test_rows_of_recycled_blocks_are_not_counted_as_cleared(rig):
    rig.run(new("A", [1, 2], run=8))
    rig.begin(new("B", [2]), finish=["A"])
    assert rig.cache.reset().rows_cleared == {HIDDEN_KEY: 4}


def test_after_a_reset_old_rows_are_absent_for_good(rig):
    rig.run(new("A", [1, 2], run=8))
    rig.cache.reset()
    taken = rig.run(new("C", [1, 3], hit=4), new("D", [2, 4], hit=4))
    assert all(isinstance(taken.failed[req_id], HitRowsAbsentError) for req_id in "CD")
    assert_rows(rig.run(new("E", [1]))["E"], ("E", 0, 4))
    assert_rows(rig.run(new("F", [1, 5], hit=4))["F"], ("E", 0, 4), ("F", 4, 8))


def test_live_requests_have_to_be_started_again_after_a_reset(rig):
    rig.run(new("A", [1]), new("B", [2]))
    rig.cache.reset()
    taken = rig.run(more("A", 1, blocks=[3]), new("C", [4]))
    assert isinstance(taken.failed["A"], RequestNotStartedError)
    assert_rows(taken["C"], ("C", 0, 4))
    assert_rows(rig.run(new("B", [5]))["B"], ("B", 0, 4))


def test_a_reset_consumes_open_steps_and_the_step_under_way(rig):
    rig.run(new("Z", [9]))
    step = rig.step(new("A", [1]))
    rig.begin(new("C", [9, 2], hit=4))
    rig.cache.reset()
    rig.assert_nothing_held()
    with pytest.raises(StepAlreadyDiscardedError):
        rig.take(step, "A")
    with pytest.raises(StepOrderError):
        rig.save()


def test_a_reset_drops_queued_writes_and_waits_for_the_one_under_way(rig):
    with rig.held():
        for req_id in "ABC":
            rig.step(new(req_id, [ord(req_id) - 64]))
        rig.wait_until_copying()
        resetter = rig.call("resetter", rig.cache.reset)
        rig.runtime.wait_until_waiting("resetter")
        assert not resetter.done
    report = resetter.result()
    assert report.writes_dropped == 2
    assert report.steps_dropped == 3
    rig.assert_nothing_held()
    taken = rig.run(new("D", [1]), new("E", [2, 4], hit=4))
    assert set(taken.failed) == {"E"}
    assert_rows(taken["D"], ("D", 0, 4))


def test_a_take_that_waits_across_a_reset_is_told_and_leaves_nothing_held(rig):
    with rig.held():
        rig.step(new("A", [1]))
        second = rig.step(new("C", [1, 2], hit=4))
        taker = rig.taking(second, "C")
        rig.wait_until_copying()
        resetter = rig.call("resetter", rig.cache.reset)
        rig.runtime.wait_until_waiting("resetter")
    resetter.result()
    with pytest.raises(CacheFailedError, match="reset while it waited"):
        taker.result(timeout_s=5)
    rig.assert_nothing_held()
    assert_rows(rig.run(new("B", [1]))["B"], ("B", 0, 4))


def test_a_reset_ends_reads_in_the_middle_of_a_gather(rig):
    rig.run(new("A", [1]))
    with rig.runtime.stop_at("prefetch.gathered") as gathering:
        rig.step(new("C", [1, 2], hit=4))
        gathering.wait_reached()
        rig.cache.flush()
        rig.cache.reset()
        rig.assert_nothing_held()
        step = rig.step(new("B", [1]))
    assert_rows(rig.take(step)["B"], ("B", 0, 4))
    assert_rows(rig.run(new("D", [1, 3], hit=4))["D"], ("B", 0, 4), ("D", 4, 8))


def test_a_reset_that_cannot_wait_any_longer_says_for_what(make_rig):
    rig = make_rig(join_timeout_s=BRIEF_S)
    with rig.runtime.stop_at("committer.write") as writing:
        rig.step(new("A", [1]))
        writing.wait_reached()
        with pytest.raises(JoinTimeoutError, match=f"reset: .*join_timeout_s={BRIEF_S}.*write of step 1 .*HOST_READY"):
            rig.cache.reset()
    rig.cache.flush()
    rig.cache.reset()
    assert_rows(rig.run(new("B", [1]))["B"], ("B", 0, 4))


def test_a_reset_that_gave_up_left_the_cache_as_it_was(make_rig):
    rig = make_rig(join_timeout_s=BRIEF_S)
    with rig.runtime.stop_at("committer.write") as writing:
        first = rig.step(new("A", [1]))
        writing.wait_reached()
        second = rig.step(new("B", [2]))
        with pytest.raises(JoinTimeoutError, match="reset"):
            rig.cache.reset()
    rig.cache.flush()
    for step, req_id in ((first, "A"), (second, "B")):
        assert_rows(rig.take(step, req_id)[req_id], (req_id, 0, 4))
    assert_rows(rig.run(new("C", [2, 3], hit=4))["C"], ("B", 0, 4), ("C", 4, 8))


# -- close


def test_close_lands_what_is_queued_ends_the_threads_and_frees_staging(make_rig):
    rig = make_rig()
    for req_id in "ABC":
        rig.step(new(req_id, [ord(req_id) - 64]))
    assert len(rig.runtime.living_threads()) == 3
    assert rig.cache.close() is True
    assert rig.runtime.living_threads() == []
    assert rig.backend.pinned_bytes == 0
    assert rig.backend.device_bytes == 0
    assert rig.cache.close() is True
    rig.assert_nothing_held()


def test_every_call_after_close_is_refused(make_rig):
    rig = make_rig()
    step = rig.step(new("A", [1]))
    rig.cache.close()
    for call in (
        lambda: rig.begin(new("B", [2])),
        lambda: rig.save(),
        lambda: rig.take(step, "A"),
        lambda: rig.cache.discard_step(step),
        lambda: rig.cache.flush(),
        lambda: rig.cache.reset(),
    ):
        with pytest.raises(CacheClosedError, match="closed"):
            call()
    assert rig.cache.stats().steps_saved == 1


def test_close_wakes_every_waiter(make_rig):
    rig = make_rig(staging_depth=2)
    with rig.held():
        first = rig.step(new("A", [1]))
        second = rig.step(new("C", [1, 2], hit=4))
        calls = [rig.taking(first, "A", thread="taker-1"), rig.taking(second, "C", thread="taker-2")]
        rig.begin(new("B", [3]))
        calls += [rig.call("saver", rig.save), rig.call("flusher", rig.cache.flush)]
        for call in calls:
            rig.runtime.wait_until_waiting(call.name)
        closer = rig.call("closer", rig.cache.close)
        for call in calls:
            with pytest.raises(CacheClosedError):
                call.result()
        assert not closer.done
    assert closer.result() is True


def test_close_with_a_copy_that_never_ends_is_bounded_and_may_be_tried_again():
    rig = CacheRig()
    with rig.held():
        rig.step(new("A", [1]))
        closer = rig.call("closer", lambda: rig.cache.close(SHORT_S))
        assert closer.result(timeout_s=5) is False
        assert rig.backend.pinned_bytes > 0
    assert rig.cache.close() is True
    assert rig.backend.pinned_bytes == 0
    rig.backend.close()
    assert rig.runtime.living_threads() == []


def test_close_during_a_gather_and_a_rescue(make_rig):
    rig = make_rig()
    rig.run(new("A", [1]))
    rig.cache.flush()
    with rig.runtime.stop_at("prefetch.gathered") as gathering, rig.runtime.stop_at("committer.set_aside") as rescuing:
        hit = rig.step(new("C", [1, 2], hit=4))
        gathering.wait_reached()
        rescuing.wait_reached()
        rig.step(new("E", [1]), finish=["A", "C"])
        taker = rig.taking(hit, "C")
        closer = rig.call("closer", rig.cache.close)
        with pytest.raises(CacheClosedError):
            taker.result()
    assert closer.result() is True
    assert rig.runtime.living_threads() == []


def test_a_failed_cache_closes_like_any_other(make_rig):
    rig = make_rig()
    rig.backend.copy_gate.fail_next_copy(OSError("page lost"))
    step = rig.step(new("A", [1]))
    with pytest.raises(CacheFailedError):
        rig.take(step)
    assert rig.cache.close() is True
    with pytest.raises(CacheClosedError):
        rig.cache.flush()


def test_a_cache_that_never_ran_a_step_closes(make_rig):
    rig = make_rig()
    assert rig.cache.close(BRIEF_S * 20) is True
    assert rig.backend.pinned_bytes == 0


def test_a_cache_that_gets_no_staging_leaves_nothing_behind(make_rig):
    with pytest.raises(MemoryError, match="max_pinned_bytes"):
        make_rig(staging_depth=4, backend_options={"max_pinned_bytes": tensor_nbytes((1,), torch.float32)})


def test_staging_refused_half_way_is_given_back(make_rig):
    rig = make_rig(staging_depth=2)
    arena_bytes = rig.config.staging_arena_bytes
    runtime = ControlledRuntime()
    backend = CpuSimBackend(runtime, max_pinned_bytes=3 * arena_bytes)
    with pytest.raises(MemoryError):
        CacheRig(runtime=runtime, backend=backend, staging_depth=4)
    assert backend.pinned_bytes == 0
    assert runtime.living_threads() == []
    backend.close()


def resident_bytes():
    """This process's memory now."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_a_closed_cache_that_is_kept_keeps_no_staging_and_no_device_memory(make_rig):
    """The books say so at once; here the memory is really gone, whatever views were made of it."""
    gc.collect()  # caches of earlier tests, which would be freed meanwhile
    before = resident_bytes()
    rig = make_rig(
        keys={"codes": ((4,), torch.int64)},
        policy=ModelCachePolicy(deferred_keys={"codes"}),
        staging_depth=3,
        extra_step_bytes=32 << 20,
        device_staging_bytes=32 << 20,
    )
    rig.run(new("A", [1, 2, 3], run=1)).release()
    for _ in range(8):  # a form that is known in every slot
        rig.run(more("A")).release()
    built = resident_bytes() - before
    assert rig.cache.close()
    # Three pages, three snapshot buffers, the ring and two bounce buffers; some may lie in what earlier tests left.
    assert built > 128 << 20
    assert resident_bytes() - before < 32 << 20
    assert rig.cache.stats().steps_saved == 9
