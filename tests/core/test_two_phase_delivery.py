# SPDX-License-Identifier: Apache-2.0
"""With two-phase delivery a row is delivered when the consumer says so; until then it is not lost."""

import pytest
from cache_rig import back, more, new
from row_values import assert_rows

from omni_core.prefix_cache.config import Delivery
from omni_core.prefix_cache.errors import InvalidConfigError, RequestNotInStepError, StepOrderError
from omni_core.prefix_cache.outputs import PartialRequest


@pytest.fixture
def careful(make_rig):
    """A rig whose consumer has to acknowledge."""
    return make_rig(delivery=Delivery.TWO_PHASE)


def test_acknowledged_rows_are_delivered_for_good(careful):
    outputs = careful.run(new("A", [1, 2], run=5))
    assert careful.cache.stats().rows_delivered == 0
    outputs.acknowledge()
    outputs.release()
    assert careful.cache.stats().rows_delivered == 5
    assert_rows(careful.run(more("A", 1))["A"], ("A", 5, 6))


def test_rows_released_without_acknowledgement_come_again(careful):
    careful.run(new("B", [1])).acknowledge()
    careful.run(new("A", [1, 2], hit=4, run=2)).release()
    outputs = careful.run(more("A", 1))
    assert_rows(outputs["A"], ("B", 0, 4), ("A", 4, 7))
    outputs.acknowledge()
    assert_rows(careful.run(more("A", 1))["A"], ("A", 7, 8))
    assert careful.cache.stats().rows_from_hits == 6


def test_some_requests_of_a_step_may_be_acknowledged(careful):
    outputs = careful.run(new("A", [1]), new("B", [2]))
    outputs.acknowledge(["B"])
    outputs.release()
    taken = careful.run(more("A", 1, blocks=[3]), more("B", 1, blocks=[4]))
    assert_rows(taken["A"], ("A", 0, 5))
    assert_rows(taken["B"], ("B", 4, 5))


def test_rows_not_yet_acknowledged_are_not_sent_twice(careful):
    first = careful.run(new("A", [1, 2], run=4))
    second = careful.run(more("A", 1))
    assert_rows(second["A"], ("A", 4, 5))
    first.acknowledge()
    second.acknowledge()


def test_an_ended_request_may_still_be_acknowledged_or_is_reported(careful):
    kept = careful.run(new("A", [1]), new("B", [2]))
    careful.begin(finish=["A", "B"])
    assert careful.cache.take_partial_requests() == ()
    kept.acknowledge(["A"])
    kept.release()
    assert careful.cache.take_partial_requests() == (PartialRequest("B", ((0, 4),)),)


def test_what_is_released_again_and_again_is_not_read_again_with_every_step(careful):
    careful.run(new("A", [1, 2, 3], run=2)).release()
    careful.run(more("A", 1)).release()
    step = careful.step(more("A", 1))
    assert careful.cache.stats().live_reads == 0
    taken = careful.take(step, "A")
    assert_rows(taken["A"], ("A", 3, 4))
    taken.acknowledge()
    assert_rows(careful.run(more("A", 1))["A"], ("A", 0, 3), ("A", 4, 5))


def test_rows_given_back_after_a_preemption_come_from_the_new_table(careful):
    outputs = careful.run(new("A", [1, 2], run=6))
    step = careful.step(back("A", [7, 8], run=7))
    outputs.release()
    taken = careful.take(step, "A")
    assert_rows(taken["A"], ("A", 6, 7))
    taken.acknowledge()
    assert_rows(careful.run(more("A", 1))["A"], ("A", 0, 6), ("A", 7, 8))


def test_rows_released_after_a_reset_are_reported(careful):
    outputs = careful.run(new("A", [1]))
    careful.cache.reset()
    outputs.release()
    assert careful.cache.take_partial_requests() == (PartialRequest("A", ((0, 4),)),)


def test_acknowledging_twice_does_nothing_and_after_release_is_an_error(careful):
    outputs = careful.run(new("A", [1]), new("B", [2]))
    outputs.acknowledge(["A"])
    outputs.acknowledge(["A"])
    outputs.release()
    outputs.acknowledge(["A"])
    with pytest.raises(StepOrderError, match="acknowledge first"):
        outputs.acknowledge()


def test_acknowledging_a_stranger_changes_nothing(careful):
    outputs = careful.run(new("A", [1]))
    with pytest.raises(RequestNotInStepError, match="'X'"):
        outputs.acknowledge(["A", "X"])
    outputs.release()
    assert_rows(careful.run(more("A", 1, blocks=[2]))["A"], ("A", 0, 5))


def test_without_two_phases_acknowledging_does_nothing(rig):
    outputs = rig.run(new("A", [1]))
    outputs.acknowledge()
    outputs.release()
    outputs.acknowledge(["A"])
    assert rig.cache.stats().rows_delivered == 4


def test_the_setting_must_be_a_delivery(make_rig):
    with pytest.raises(InvalidConfigError, match="delivery='two_phase'"):
        make_rig(delivery="two_phase")
