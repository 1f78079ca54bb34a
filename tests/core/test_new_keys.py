# SPDX-License-Identifier: Apache-2.0
"""A key is known from the step that was saved with it, not before: a save that fails leaves no trace of its keys."""

import pytest
import torch
from cache_rig import new
from controlled_runtime import ControlledRuntime
from omni_core_cpu_sim import CpuSimBackend
from row_values import assert_rows

from omni_core.backend import BackendError, PinnedArena, SnapshotRing
from omni_core.prefix_cache.config import HIDDEN_KEY
from omni_core.prefix_cache.errors import StepOrderError


class Uncopyable:
    def __copy__(self):
        raise TypeError("cannot be copied")


class RefusesOneCopy(CpuSimBackend):
    refuses = False

    def copy_to_host(self, destination, source, stream):
        if self.refuses:
            self.refuses = False
            raise BackendError("the device took no copy")
        return super().copy_to_host(destination, source, stream)


def raise_on_a_leftover(rig, codes):
    with pytest.raises(TypeError, match="cannot be copied"):
        rig.save({"codes": codes, "odd": Uncopyable()})


def raise_on_the_copy(rig, codes):
    rig.backend.refuses = True
    with pytest.raises(BackendError, match="took no copy"):
        rig.save({"codes": codes})


def raise_on_a_reset(rig, codes):
    with rig.runtime.stop_at("save_outputs.recorded") as recorded:
        saver = rig.call("saver", lambda: rig.save({"codes": codes}))
        recorded.wait_reached()
        rig.cache.reset()
    with pytest.raises(StepOrderError, match="reset"):
        saver.result()
    rig.begin(new("A", [1]))


@pytest.mark.parametrize("fail", [raise_on_a_leftover, raise_on_the_copy, raise_on_a_reset])
@pytest.mark.parametrize("width", [2, 5], ids=["same-bytes", "other-bytes"])
def test_a_save_that_failed_binds_its_keys_to_no_form(make_rig, fail, width):
    runtime = ControlledRuntime()
    rig = make_rig(runtime=runtime, backend=RefusesOneCopy(runtime))
    rig.begin(new("A", [1]))
    fail(rig, torch.ones(4, 2, dtype=torch.int32))
    assert "codes" not in rig.cache.stats().key_row_bytes
    codes = torch.arange(4.0 * width).reshape(4, width) + 0.5
    assert torch.equal(rig.take(rig.save({"codes": codes}))["A"]["codes"], codes)
    rig.begin(new("C", [1, 2], hit=4))
    rows = rig.take(rig.save({"codes": codes + 100}))["C"]
    assert_rows(rows, ("A", 0, 4), ("C", 4, 8))
    assert rows["codes"].dtype == torch.float32
    assert torch.equal(rows["codes"], torch.cat([codes, codes + 100]))


def test_stats_show_a_new_key_from_the_save_on(rig):
    rig.run(new("A", [1]))
    with rig.runtime.stop_at("save_outputs.recorded") as recorded:
        rig.begin(new("B", [2]))
        saver = rig.call("saver", lambda: rig.save({"codes": torch.ones(4, 2)}))
        recorded.wait_reached()
        before = rig.cache.stats()
    step = saver.result()
    assert before.key_row_bytes == {HIDDEN_KEY: 12}
    after = rig.cache.stats()
    assert after.key_row_bytes == {HIDDEN_KEY: 12, "codes": 8}
    assert after.pool_reserved_bytes - before.pool_reserved_bytes == 8 * rig.config.num_slots
    assert set(rig.take(step)["B"].rows) == {HIDDEN_KEY, "codes"}


class WatchedArena(PinnedArena):
    def __init__(self, inner, note):
        self._inner = inner
        self._note = note

    @property
    def buffer(self):
        return self._inner.buffer

    @property
    def pinned_bytes(self):
        self._note("PinnedArena.pinned_bytes")
        return self._inner.pinned_bytes

    def close(self):
        self._inner.close()


class WatchedRing(SnapshotRing):
    def __init__(self, inner, note):
        self._inner = inner
        self._note = note

    @property
    def device_bytes(self):
        self._note("SnapshotRing.device_bytes")
        return self._inner.device_bytes

    def slot(self, index):
        return self._inner.slot(index)

    def close(self):
        self._inner.close()


class WatchedBackend(CpuSimBackend):
    """Notes what is asked of its memory, and whether the cache's lock was held."""

    def __init__(self, runtime):
        super().__init__(runtime, report_arenas_as_pinned=True)
        self.asked = set()
        self.holds = runtime.holds

    def note(self, what):
        self.asked.add((what, self.holds("prefix-cache")))

    def pinned_arena(self, nbytes, *, chunk_bytes=0):
        return WatchedArena(super().pinned_arena(nbytes, chunk_bytes=chunk_bytes), self.note)

    def snapshot_ring(self, depth, nbytes, device):
        return WatchedRing(super().snapshot_ring(depth, nbytes, device), self.note)


def test_stats_ask_the_backend_for_its_figures_without_the_caches_lock(make_rig):
    runtime = ControlledRuntime()
    rig = make_rig(runtime=runtime, backend=WatchedBackend(runtime))
    stats = rig.cache.stats()
    assert stats.pinned_bytes == rig.backend.pinned_bytes > 0
    assert stats.device_bytes == rig.backend.device_bytes > 0
    assert rig.backend.asked == {("PinnedArena.pinned_bytes", False), ("SnapshotRing.device_bytes", False)}
