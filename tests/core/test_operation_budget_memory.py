# SPDX-License-Identifier: Apache-2.0
"""After warm-up a step allocates no memory of tensors, and leaves none behind."""

import gc
import tracemalloc
from pathlib import Path

import omni_core_cpu_sim
import pytest
from budget_loads import WARM_UP_STEPS
from budget_plain_loads import Decoding, Hitting, Prefilling
from controlled_runtime import ControlledRuntime

import omni_core

MANY_STEPS = 200
LOADS = [Decoding, Prefilling, Hitting]


@pytest.mark.parametrize("load", LOADS)
def test_the_engine_allocates_no_tensor_no_arena_and_no_snapshot_buffer(make_rig, load):
    working = load(make_rig, 16)
    backend = working.rig.backend
    before = (backend.pinned_allocations, backend.device_allocations)
    for _ in range(WARM_UP_STEPS):
        step = working.step()
        assert (step.starting.ops.new_storages, step.saving.ops.new_storages) == (0, 0)
    assert (backend.pinned_allocations, backend.device_allocations) == before


def test_materialize_reuses_what_was_released(make_rig):
    decoding = Decoding(make_rig, 16)
    for _ in range(WARM_UP_STEPS):
        assert decoding.step().taking.ops.new_storages == 0


def test_many_steps_leave_no_memory_behind(make_rig):
    prefilling = Prefilling(make_rig, 16, growth=0, runtime=ControlledRuntime())
    kept_bytes = []
    tracemalloc.start()
    try:
        for _ in range(3):
            prefilling.warm_up(MANY_STEPS)
            gc.collect()
            kept_bytes.append(cache_bytes(tracemalloc.take_snapshot()))
    finally:
        tracemalloc.stop()
    assert kept_bytes[2] - kept_bytes[1] < MANY_STEPS


def cache_bytes(snapshot):
    """Bytes allocated by lines of the cache and the simulator."""
    ours = [
        tracemalloc.Filter(True, str(Path(package.__path__[0]) / "*")) for package in (omni_core, omni_core_cpu_sim)
    ]
    return sum(trace.size for trace in snapshot.filter_traces(ours).traces)
