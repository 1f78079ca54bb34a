# SPDX-License-Identifier: Apache-2.0
"""A reset that meets a write at any moment, in many schedules: nothing that was saved before it comes after it."""

from contextlib import contextmanager

import pytest
from cache_rig import CacheRig, new
from row_values import assert_rows

from omni_core.testing.seeded_runtime import SeededRuntime

SEEDS = range(40)
ROUNDS = 3
LOOKS = 4


@contextmanager
def seeded_rig(seed):
    with SeededRuntime(seed, stall_limit_s=5) as runtime:
        rig = CacheRig(runtime=runtime, num_blocks=8)
        yield rig
        assert rig.cache.close()
        rig.backend.close()


@pytest.mark.parametrize("fails", [False, True], ids=["its copy ends well", "its copy fails"])
def test_no_write_is_under_way_after_a_reset(fails):
    for seed in SEEDS:
        with seeded_rig(seed) as rig:
            for _ in range(ROUNDS):
                if fails:
                    rig.backend.copy_gate.fail_next_copy(OSError("page lost"))
                rig.step(new("A", [1]))
                rig.cache.reset()
                for _ in range(LOOKS):
                    assert rig.cache.stats().queued_writes == 0, f"seed {seed}"
                assert_rows(rig.run(new("B", [1]))["B"], ("B", 0, 4))
                rig.cache.flush()
                rig.begin(finish=["B"])


def test_a_reset_leaves_no_failure_of_a_write_that_was_saved_before_it():
    for seed in SEEDS:
        with seeded_rig(seed) as rig:
            for _ in range(ROUNDS):
                rig.backend.copy_gate.fail_next_copy(OSError("page lost"))
                rig.step(new("A", [1]))
                rig.cache.reset()
                for _ in range(LOOKS):
                    rig.begin()
                rig.cache.flush()
