# SPDX-License-Identifier: Apache-2.0
"""What a step's plan may not see: rows of a tenant that is gone, and rows gathered for the plan before it."""

import dataclasses

import pytest
from cache_rig import new
from row_values import assert_rows

from omni_core.prefix_cache.errors import HitRowsAbsentError
from omni_core.prefix_cache.events import RequestEvent, RequestEventKind


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


@pytest.mark.parametrize("order", [1, -1], ids=["taken over first", "hit first"])
def test_a_hit_on_a_block_taken_over_in_the_same_step_and_never_filled_is_absent(rig, order):
    rig.run(new("A", [1]))
    events = [
        RequestEvent(RequestEventKind.STARTED, "B", (1,), 0, 4),
        RequestEvent(RequestEventKind.STARTED, "D", (1, 2), 4, 4),
    ]
    # B is aborted before the forward, its block already published.
    rig.begin_as([RequestEvent(RequestEventKind.FINISHED, "A"), *events[::order]], new("D", [1, 2], hit=4))
    assert isinstance(rig.take(rig.save(), "D").failed["D"], HitRowsAbsentError)
