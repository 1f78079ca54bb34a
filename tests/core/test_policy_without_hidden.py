# SPDX-License-Identifier: Apache-2.0
"""A stage that keeps no hidden rows and has no stored key delivers what its steps computed, and claims no more."""

import pytest
import torch
from cache_rig import more, new
from row_values import assert_rows

from omni_core.prefix_cache.policy import ModelCachePolicy

CODES = {"codes": ((4,), torch.int64)}


@pytest.fixture
def make_bare(make_rig):
    return lambda **options: make_rig(policy=ModelCachePolicy(needs_full_hidden_states=False), **options)


def test_a_hit_with_nothing_stored_delivers_the_steps_own_rows(make_bare):
    rig = make_bare()
    rig.run(new("A", [1, 2], run=8))
    rows = rig.run(new("C", [1, 2, 3], hit=8))["C"]
    assert rows.ranges == ((8, 12),)
    assert rows.num_rows == 4
    assert rows.zero_ranges == {}
    assert_rows(rows, ("C", 8, 12))
    stats = rig.cache.stats()
    assert stats.rows_delivered == 8 + 4
    assert stats.rows_from_hits == 0
    rig.assert_nothing_held()


def test_rows_of_a_discarded_step_with_nothing_stored_are_not_claimed_later(make_bare):
    rig = make_bare()
    rig.cache.discard_step(rig.step(new("A", [1])))
    rows = rig.run(more("A", 1, blocks=[2]))["A"]
    assert rows.ranges == ((4, 5),)
    assert_rows(rows, ("A", 4, 5))
    assert rig.cache.stats().rows_from_hits == 0


def test_a_key_that_is_stored_is_joined_and_counted(make_bare):
    rig = make_bare(keys=CODES)
    rig.run(new("A", [1, 2], run=8))
    rows = rig.run(new("C", [1, 2, 3], hit=8))["C"]
    assert rows.ranges == ((0, 12),)
    assert_rows(rows, ("A", 0, 8), ("C", 8, 12), key="codes", trailing=(4,), dtype=torch.int64)
    assert_rows(rows, ("C", 8, 12))
    assert rig.cache.stats().rows_from_hits == 8
