# SPDX-License-Identifier: Apache-2.0
"""A request event with a negative count is that request's error; nobody's rows move because of it."""

import pytest
from cache_rig import new
from row_values import assert_rows

from omni_core.prefix_cache.errors import RequestEventError
from omni_core.prefix_cache.events import BlockCopy, RequestEvent, RequestEventKind, StepEvents

STARTED = RequestEventKind.STARTED


@pytest.mark.parametrize("scheduled", [-1, -4, -100])
def test_a_negative_number_of_scheduled_tokens_fails_its_request_alone(rig, scheduled):
    rig.run(new("P", [1]), new("Q", [2]))
    rig.begin_as(
        [RequestEvent(STARTED, "A", (1, 3), 4, scheduled), RequestEvent(STARTED, "B", (2, 4), 4, 4)],
        new("A", [1, 3], hit=4),
        new("B", [2, 4], hit=4),
    )
    taken = rig.take(rig.save())
    error = taken.failed["A"]
    assert isinstance(error, RequestEventError)
    assert f"num_scheduled_tokens={scheduled}" in str(error)
    assert_rows(taken["B"], ("Q", 0, 4), ("B", 4, 8))
    rig.assert_nothing_held()


@pytest.mark.parametrize("blocks", [(), (1,), (1, 3)], ids=str)
@pytest.mark.parametrize("computed", [-1, -4, -7])
@pytest.mark.parametrize("copies", [(), (BlockCopy(2, 5),)], ids=["no-copies", "copies"])
def test_a_negative_number_of_computed_tokens_fails_its_request_alone(rig, blocks, computed, copies):
    rig.run(new("Q", [2]))
    rig.schedule(new("A", [1, 3]), new("B", [2, 4], hit=4))
    rig.cache.new_step_starts(
        StepEvents((RequestEvent(STARTED, "A", blocks, computed, 4), RequestEvent(STARTED, "B", (2, 4), 4, 4)), copies)
    )
    taken = rig.take(rig.save())
    error = taken.failed["A"]
    assert isinstance(error, RequestEventError)
    assert f"num_computed_tokens={computed}" in str(error)
    assert_rows(taken["B"], ("Q", 0, 4), ("B", 4, 8))
    rig.assert_nothing_held()


def test_no_scheduled_tokens_are_no_error(rig):
    rig.run(new("P", [1]))
    rig.begin_as([RequestEvent(STARTED, "C", (1, 2), 4, 0)], new("C", [1, 2], hit=4))
    assert_rows(rig.take(rig.save())["C"], ("P", 0, 4), ("C", 4, 8))
