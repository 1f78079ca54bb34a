# SPDX-License-Identifier: Apache-2.0
"""Whoever waits or works across a reset is told: rows computed before it never reach the cache after it."""

import pytest
from cache_rig import new
from row_values import assert_rows

from omni_core.prefix_cache.errors import CacheFailedError, HitRowsAbsentError, StepOrderError
from omni_core.prefix_cache.events import StepEvents


def assert_no_row_survived(rig):
    taken = rig.run(new("C", [1, 3], hit=4), new("B", [2]))
    assert isinstance(taken.failed["C"], HitRowsAbsentError)
    assert_rows(taken["B"], ("B", 0, 4))
    rig.assert_nothing_held()


def test_a_save_overtaken_by_a_reset_stores_nothing(rig):
    rig.run(new("P", [9]))
    rig.begin(new("A", [1]), new("H", [9, 4], hit=4))
    with rig.runtime.stop_at("save_outputs.recorded") as recorded:
        saver = rig.call("saver", rig.save)
        recorded.wait_reached()
        assert rig.cache.reset().steps_dropped == 0
    with pytest.raises(StepOrderError, match="reset meanwhile"):
        saver.result()
    # As on one thread: the announced step has ended.
    with pytest.raises(StepOrderError, match="new_step_starts"):
        rig.save()
    assert_no_row_survived(rig)
    assert rig.cache.stats().steps_saved == 2


def test_a_save_overtaken_by_a_reset_and_the_next_announcement_stores_nothing(rig):
    rig.begin(new("A", [1]))
    with rig.runtime.stop_at("save_outputs.recorded") as recorded:
        saver = rig.call("saver", rig.save)
        recorded.wait_reached()
        rig.cache.reset()
        rig.cache.new_step_starts(StepEvents())
    with pytest.raises(StepOrderError, match="reset meanwhile"):
        saver.result()
    rig.begin()
    assert_no_row_survived(rig)


def test_a_save_that_waits_for_staging_across_a_reset_stores_nothing(make_rig):
    rig = make_rig(staging_depth=1)
    rig.step(new("U", [5]))
    rig.cache.flush()
    rig.begin(new("A", [1]))
    saver = rig.call("saver", rig.save)
    rig.runtime.wait_until_waiting("saver")
    assert rig.cache.reset().steps_dropped == 1
    with pytest.raises(StepOrderError, match="reset meanwhile"):
        saver.result()
    assert_no_row_survived(rig)


def test_a_flush_across_a_reset_does_not_say_that_dropped_writes_landed(rig):
    with rig.runtime.stop_at("committer.host_ready") as writing:
        rig.step(new("A", [1]))
        rig.step(new("X", [2]))
        writing.wait_reached()
        flusher = rig.call("flusher", rig.cache.flush)
        rig.runtime.wait_until_waiting("flusher")
        resetter = rig.call("resetter", rig.cache.reset)
        rig.runtime.wait_until_waiting("resetter")
    assert resetter.result().writes_dropped == 1
    with pytest.raises(CacheFailedError, match="flush: the cache was reset meanwhile"):
        flusher.result()
    rig.cache.flush()
    assert_no_row_survived(rig)
