# SPDX-License-Identifier: Apache-2.0
"""Records on their way to the host: behind their clone, and landed in the order of their steps."""

import pytest
from cache_rig import back, new
from deferred_rig import DeferredRig, assert_both, assert_mel, deferred_rigs
from omni_core_cpu_sim import CpuSimBackend

from omni_core.backend import DeviceWaitTimeoutError
from omni_core.testing.seeded_runtime import SeededRuntime

SEEDS = range(5)
A_WHILE_S = 1.0
"""Virtual: it passes only when no thread can do anything more."""


@pytest.fixture
def rig():
    with deferred_rigs() as make:
        yield make()


def test_of_two_records_brought_by_one_flush_the_later_tenants_rows_stay(rig):
    rig.discard(rig.step(new("A", [1])))
    # A is preempted, which nobody tells the cache; its block goes to B while both records are on the device.
    rig.discard(rig.step(new("B", [1])))
    assert rig.on_device()[0] == 2
    assert rig.copies() == 0
    rig.cache.flush()
    assert_both(rig.run(new("D", [1, 2], hit=4, run=1))["D"], ("B", 0, 4), ("D", 4, 5))


def test_rows_of_a_preempted_request_do_not_come_back_into_a_block_it_lost(rig):
    rig.discard(rig.step(new("A", [1])))
    rig.discard(rig.step(new("B", [1])))
    assert_both(rig.run(back("A", [3, 4], run=5))["A"], ("A", 0, 5))
    assert_both(rig.run(new("D", [1, 2], hit=4, run=1))["D"], ("B", 0, 4), ("D", 4, 5))


class EngineOnItsOwnStream(CpuSimBackend):
    """What the engine queues runs behind it, in copies that can be held, as on a real device."""

    def __init__(self, runtime):
        super().__init__(runtime)
        self._compute = self.new_stream("compute")

    def current_stream(self):
        return self._compute

    def snapshot(self, tensor, carver):
        clone = carver.take(tensor.shape, tensor.dtype)
        self._compute.queue_copy(clone, tensor)
        return clone


@pytest.mark.parametrize("seed", SEEDS)
def test_a_record_is_not_copied_before_the_engines_stream_has_cloned_it(seed):
    with SeededRuntime(seed) as runtime:
        device = EngineOnItsOwnStream(runtime)
        rig = DeferredRig(runtime=runtime, backend=device, needs_full_hidden_states=False)
        with rig.held():
            rig.discard(rig.step(new("A", [1]), hidden=None))
            rig.begin(finish=["A"])
            with pytest.raises(DeviceWaitTimeoutError, match="1 of 2 copies"):
                device.copy_gate.wait_until_waiting(2, A_WHILE_S)
        assert_mel(rig.run(new("C", [1, 2], hit=4), hidden=None)["C"], ("A", 0, 4), ("C", 4, 8))
        assert rig.cache.close()
        device.close()
