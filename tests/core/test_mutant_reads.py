# SPDX-License-Identifier: Apache-2.0
"""A row that was planned again belongs to its new plan: what was gathered for the old one settles nothing."""

import dataclasses

from cache_rig import new
from row_values import assert_rows


def onto_block(rig, block):
    """The layout of the step under way, its first request's rows put into `block` instead."""
    layout = rig.layout()
    slots = layout.slots.copy()
    count = rig.batch[0].last - rig.batch[0].first
    slots[:count] = [block * rig.config.block_size + offset for offset in range(count)]
    return dataclasses.replace(layout, slots=slots)


def test_a_gather_from_before_the_save_leaves_rows_planned_again_to_be_set_aside(rig):
    rig.run(new("A", [1]))
    with rig.runtime.stop_at("prefetch.gathered") as old_gather:
        rig.begin(new("B", [3]), new("C", [1, 2], hit=4))
        old_gather.wait_reached()
        with rig.runtime.stop_at("prefetch.landed") as new_gather:
            hit = rig.save(layout=onto_block(rig, 1))
            rig.cache.flush()
            old_gather.open()
            new_gather.wait_reached()
            # Nobody has gathered B's rows yet, and now they are overwritten.
            rig.run(new("E", [1]), finish=["A"])
            rig.cache.flush()
    assert_rows(rig.take(hit, "C")["C"], ("B", 0, 4), ("C", 4, 8))
