# SPDX-License-Identifier: Apache-2.0
"""A staging page stays out of use until the device has stopped writing into it, whatever became of its step.

The backend here owns floating-point tensors only. The codes are values that lie on the host already, as they do beside
a real device: they are written straight into the page, where a late copy of another step would overwrite them.
"""

import pytest
import torch
from cache_rig import BRIEF_S, SHORT_S, CacheRig, new
from controlled_runtime import PATIENCE_S, ControlledRuntime
from omni_core_cpu_sim import CpuSimBackend
from row_values import assert_rows

from omni_core.prefix_cache.errors import (
    CacheClosedError,
    CacheFailedError,
    OmniPrefixCacheStagingTimeoutError,
    StepOrderError,
)

CODES = {"codes": ((2,), torch.int64)}


class FloatsOnTheDevice(CpuSimBackend):
    def owns(self, tensor):
        return tensor.dtype.is_floating_point


class Uncopyable:
    def __copy__(self):
        raise TypeError("cannot be copied")


@pytest.fixture
def make_host_rig(make_rig):
    def make(**options):
        runtime = ControlledRuntime()
        return make_rig(runtime=runtime, backend=FloatsOnTheDevice(runtime), keys=CODES, **options)

    return make


def assert_right(rig, step, req_id):
    rows = rig.take(step, req_id)[req_id]
    assert_rows(rows, (req_id, 0, 4))
    assert_rows(rows, (req_id, 0, 4), key="codes", trailing=(2,), dtype=torch.int64)


def assert_page_is_withheld_until_its_copy_ends(rig, end_hold):
    """With every other page taken, a step gets none while the copy is held, and its rows are right afterwards."""
    rig.begin(new("D", [9]))
    with pytest.raises(OmniPrefixCacheStagingTimeoutError, match="staging_claim_timeout_s"):
        rig.save()
    end_hold()
    assert rig.runtime.comes_true(lambda: rig.cache.stats().staging_slots_in_use < rig.config.staging_depth)
    assert_right(rig, rig.save(), "D")


def test_a_save_that_raises_leaves_no_copy_behind_that_reaches_the_next_step(make_host_rig):
    rig = make_host_rig(staging_depth=1)
    with rig.held():
        rig.begin(new("A", [1, 2, 3], run=12))
        with pytest.raises(TypeError, match="cannot be copied"):
            rig.save({"odd": Uncopyable()})
        rig.begin()
        step = rig.step(new("D", [4]))
    assert_right(rig, step, "D")


def test_a_save_that_finds_the_cache_reset_leaves_its_page_to_the_copy(make_host_rig):
    rig = make_host_rig(staging_depth=1, staging_claim_timeout_s=SHORT_S)
    with rig.held(), rig.runtime.stop_at("save_outputs.recorded") as recorded:
        rig.begin(new("A", [1, 2, 3], run=12))
        saver = rig.call("saver", rig.save)
        recorded.wait_reached()
        rig.cache.reset()
        recorded.open()
        with pytest.raises(StepOrderError):
            saver.result()
        assert_page_is_withheld_until_its_copy_ends(rig, rig.backend.copy_gate.release_copies)


def test_a_save_that_finds_the_cache_failed_leaves_its_page_to_the_copy(make_host_rig):
    rig = make_host_rig(staging_depth=2, staging_claim_timeout_s=SHORT_S)
    with rig.held():
        rig.backend.copy_gate.fail_next_copy(OSError("page lost"))
        rig.step(new("A", [1]))
        with rig.runtime.stop_at("save_outputs.recorded") as recorded:
            rig.begin(new("X", [2, 3, 5], run=12))
            saver = rig.call("saver", rig.save)
            recorded.wait_reached()
            rig.backend.copy_gate.let_through(1)
            with pytest.raises(CacheFailedError):
                rig.cache.flush(PATIENCE_S)
        with pytest.raises(CacheFailedError):
            saver.result()
        rig.cache.reset()
        # The page whose copy failed is free again; the other one is not.
        assert rig.runtime.comes_true(lambda: rig.cache.stats().staging_slots_in_use <= 1)
        step = rig.step(new("B", [6]))
        assert_page_is_withheld_until_its_copy_ends(rig, rig.backend.copy_gate.release_copies)
    assert_right(rig, step, "B")


def test_a_save_that_finds_the_cache_closed_keeps_its_page_mapped_until_the_copy_ends():
    runtime = ControlledRuntime()
    rig = CacheRig(runtime=runtime, backend=FloatsOnTheDevice(runtime), keys=CODES)
    with rig.held(), rig.runtime.stop_at("save_outputs.recorded") as recorded:
        rig.begin(new("A", [1]))
        saver = rig.call("saver", rig.save)
        recorded.wait_reached()
        assert rig.call("closer", lambda: rig.cache.close(SHORT_S)).result() is False
        recorded.open()
        with pytest.raises(CacheClosedError):
            saver.result()
        assert rig.call("closer", lambda: rig.cache.close(SHORT_S)).result() is False
        assert rig.backend.pinned_bytes > 0
    rig.stop()


def test_a_write_that_a_reset_drops_leaves_its_page_to_the_copy(make_host_rig):
    rig = make_host_rig(staging_depth=2, staging_claim_timeout_s=SHORT_S)
    with rig.held():
        with rig.runtime.stop_at("committer.host_ready") as writing:
            rig.step(new("A", [1]))
            rig.step(new("X", [2, 3, 5], run=12))
            rig.backend.copy_gate.let_through(1)
            writing.wait_reached()
            resetter = rig.call("resetter", rig.cache.reset)
            rig.runtime.wait_until_waiting("resetter")
        assert resetter.result().writes_dropped == 1
        step = rig.step(new("B", [6]))
        assert_page_is_withheld_until_its_copy_ends(rig, rig.backend.copy_gate.release_copies)
    assert_right(rig, step, "B")


def test_a_write_that_timed_out_leaves_its_page_to_the_copy(make_host_rig):
    rig = make_host_rig(staging_depth=1, staging_claim_timeout_s=SHORT_S, join_timeout_s=BRIEF_S)
    with rig.held():
        rig.step(new("A", [1, 2, 3], run=12))
        with pytest.raises(CacheFailedError, match="not complete"):
            rig.cache.flush(PATIENCE_S)
        rig.cache.reset()
        assert_page_is_withheld_until_its_copy_ends(rig, rig.backend.copy_gate.release_copies)
