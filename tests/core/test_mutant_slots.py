# SPDX-License-Identifier: Apache-2.0
"""A row without a slot is stored nowhere. -1 counts from the end in numpy and torch, and that slot is a real one."""

import dataclasses

import pytest
from cache_rig import new
from row_values import assert_rows


@pytest.mark.parametrize("unstored", [[3], [0, 2], [0, 1, 2, 3]], ids=str)
@pytest.mark.parametrize("landed", [True, False], ids=["landed", "queued"])
def test_rows_without_a_slot_leave_the_last_slot_of_the_pool_alone(rig, unstored, landed):
    last = rig.config.num_blocks - 1
    rig.run(new("A", [last]))
    rig.begin(new("B", [3]))
    layout = rig.layout()
    slots = layout.slots.copy()
    slots[unstored] = -1
    rig.take(rig.save(layout=dataclasses.replace(layout, slots=slots)))
    if landed:
        rig.cache.flush()
    assert_rows(rig.run(new("C", [last, 4], hit=4))["C"], ("A", 0, 4), ("C", 4, 8))
