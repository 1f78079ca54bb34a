# SPDX-License-Identifier: Apache-2.0
"""A request started with a hit may be scheduled in a later step than the one it was announced with."""

import pytest
from cache_rig import new
from row_values import assert_rows

from omni_core.prefix_cache.errors import HitRowsAbsentError, RequestNotInStepError
from omni_core.prefix_cache.outputs import PartialRequest


@pytest.fixture
def later(rig):
    """P's eight rows are stored; A is announced with a hit on them beside B, but only B is in the saved step."""
    rig.run(new("P", [1, 2], run=8))
    rig.begin(new("A", [1, 2, 3], hit=8), new("B", [4]), finish=["P"])
    late, here = rig.batch
    rig.batch = [here]
    return late


@pytest.mark.parametrize("consume", ["take", "discard"])
def test_its_hit_comes_with_the_first_step_that_has_it(rig, later, consume):
    step = rig.save()
    if consume == "take":
        assert_rows(rig.take(step)["B"], ("B", 0, 4))
    else:
        rig.cache.discard_step(step)
    rig.begin()
    rig.batch = [later]
    assert_rows(rig.take(rig.save())["A"], ("P", 0, 8), ("A", 8, 12))
    rig.begin(finish=["A", "B"])
    expected = () if consume == "take" else (PartialRequest("B", ((0, 4),)),)
    assert rig.cache.take_partial_requests() == expected
    rig.assert_nothing_held()


def test_its_hit_comes_although_the_step_it_was_announced_with_is_taken_later(rig, later):
    early = rig.save()
    rig.begin()
    rig.batch = [later]
    late = rig.save()
    assert_rows(rig.take(late, "A")["A"], ("P", 0, 8), ("A", 8, 12))
    with pytest.raises(RequestNotInStepError):
        rig.take(early, "A")
    assert_rows(rig.take(early, "B")["B"], ("B", 0, 4))
    rig.assert_nothing_held()


def test_its_hit_is_reported_if_it_ends_before_it_ran(rig, later):
    rig.take(rig.save())
    rig.begin(finish=["A"])
    assert rig.cache.take_partial_requests() == (PartialRequest("A", ((0, 8),)),)
    rig.assert_nothing_held()


def test_its_hit_on_rows_that_are_not_stored_is_its_error(rig):
    rig.begin(new("A", [1, 2], hit=4), new("B", [4]))
    late, here = rig.batch
    rig.batch = [here]
    taken = rig.take(rig.save())
    assert taken.failed == {}
    assert_rows(taken["B"], ("B", 0, 4))
    rig.begin()
    rig.batch = [late]
    assert isinstance(rig.take(rig.save()).failed["A"], HitRowsAbsentError)
    rig.begin(finish=["A"])
    assert rig.cache.take_partial_requests() == ()
