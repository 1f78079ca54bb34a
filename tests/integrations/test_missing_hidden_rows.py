# SPDX-License-Identifier: Apache-2.0
"""Without stored hidden rows, a step that was put off costs its hidden rows; the request says so."""

import threading

import fake_runner as fake
import pytest
from delivery_rig import BOUND_S
from fake_stage import FakeStage

from omni_core.prefix_cache.config import HIDDEN_KEY
from omni_core.prefix_cache.policy import ModelCachePolicy

PROMPT = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]
REQUEST = "a-00000001"


class StepNumbers(fake.FakeModel):
    """Hands out, beside its codes, one number per step: an output without a row per token."""

    def take_stage_outputs(self):
        return super().take_stage_outputs() | {"step_number": self.taken}


def stored_after_one_step_put_off(stage):
    """Steps for positions 0-5, 6-9 and 10, of which the sink's full queue puts off the second."""
    entered, go_on = threading.Event(), threading.Event()
    accept = stage.session.sink.accept

    def slow(delivery):
        entered.set()
        assert go_on.wait(BOUND_S)
        accept(delivery)

    stage.session.sink.accept = slow
    stage.step(fake.scheduled(new=[(REQUEST, PROMPT, [1, 2, 3], 0, 6)]))
    assert entered.wait(BOUND_S)
    stage.step(fake.scheduled(running=[(REQUEST, 6, 4, None)]), a_00000001=21)
    go_on.set()
    stage.session.flush(BOUND_S, [REQUEST])
    stage.step(fake.scheduled(running=[(REQUEST, 10, 1, None)]), a_00000001=22)
    stage.session.flush(BOUND_S, ())
    assert stage.session.report()["delivery"]["steps_given_up"] == 1
    stored = stage.stored(REQUEST)
    stage.session.close(BOUND_S)
    return stored


@pytest.mark.parametrize("model", [None, object()])
def test_hidden_rows_that_were_put_off_and_not_stored_are_missing_whatever_other_key_came(model):
    policy = ModelCachePolicy(needs_full_hidden_states=False)
    stored = stored_after_one_step_put_off(FakeStage(model=model, policy=policy, sink_queue_bytes=1))
    assert stored.ranges_of(HIDDEN_KEY) == ((0, 6), (10, 11))
    assert (stored.missing, stored.complete) == (((6, 10),), False)
    if model is None:
        assert stored.ranges_of("codes") == ((0, 11),)


def test_rows_of_a_step_put_off_come_later_and_its_outputs_without_a_row_per_token_do_not():
    stored = stored_after_one_step_put_off(FakeStage(model=StepNumbers(), sink_queue_bytes=1))
    assert (stored.ranges, stored.missing, stored.complete) == (((0, 11),), (), True)
    assert stored.leftovers["step_number"] == (1, 3)
