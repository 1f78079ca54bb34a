# SPDX-License-Identifier: Apache-2.0
"""Two records of one slot that leave the device together land in the order of their steps."""

import pytest
from cache_rig import back, new
from deferred_rig import assert_both, deferred_rigs


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
