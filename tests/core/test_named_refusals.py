# SPDX-License-Identifier: Apache-2.0
"""What this version does not do yet is refused by name; where it concerns one request, that request alone."""

import pytest
import torch
from cache_rig import more, new
from row_values import assert_rows

from omni_core.prefix_cache.errors import FeatureUnsupportedError, LifecycleUnsupportedError
from omni_core.prefix_cache.events import RequestEvent, RequestEventKind
from omni_core.prefix_cache.policy import ModelCachePolicy


def test_deferred_keys_are_refused_by_name_and_the_old_policy_stays(make_rig):
    rig = make_rig(keys={"codes": ((4,), torch.float32)}, policy=ModelCachePolicy(token_keys={"codes"}))
    with pytest.raises(FeatureUnsupportedError, match=r"deferred_keys=\['mel', 'wave'\].*JOIN_ON_FINISH.*token_keys"):
        rig.cache.register_policy(ModelCachePolicy(deferred_keys={"wave", "mel"}))
    assert_rows(rig.run(new("A", [1], run=1))["A"], ("A", 0, 1), key="codes", trailing=(4,))


@pytest.mark.parametrize("counts", [{}, {"A": 2}])
def test_sampled_counts_are_refused_by_name_and_the_step_stays(rig, counts):
    step = rig.step(new("A", [1]))
    with pytest.raises(FeatureUnsupportedError, match=f"step {step}: sampled_counts"):
        rig.cache.materialize(step, ["A"], sampled_counts=counts)
    assert_rows(rig.take(step)["A"], ("A", 0, 4))


@pytest.mark.parametrize("kind", [RequestEventKind.RESUMED, RequestEventKind.REPLACED])
@pytest.mark.parametrize("live", [True, False])
def test_resumed_and_replaced_requests_fail_alone_and_by_name(rig, kind, live):
    rig.run(*([new("A", [1])] if live else []), new("B", [2]))
    event = RequestEvent(kind, "A", (1, 3), 4, 2)
    told = [event, RequestEvent(RequestEventKind.STARTED, "C", (2, 5), 4, 2)]
    again = more("A", 2, blocks=[3], at=4) if live else new("A", [1, 3], hit=4, run=2)
    rig.begin_as(told, again, new("C", [2, 5], hit=4, run=2))
    taken = rig.take(rig.save())
    assert isinstance(taken.failed["A"], LifecycleUnsupportedError)
    assert kind.value in str(taken.failed["A"])
    assert_rows(taken["C"], ("B", 0, 4), ("C", 4, 6))
    assert set(rig.run(more("A", 1), more("C", 1), events=[event]).failed) == {"A"}
    assert rig.cache.stats().requests_failed == 1
    # What it computed lies in its blocks; when it has ended its id is free again.
    assert_rows(rig.run(new("A", [6]), finish=["A"])["A"], ("A", 0, 4))


def test_a_request_started_again_while_live_fails_alone_and_by_name(rig):
    rig.run(new("A", [1]), new("B", [2]))
    taken = rig.run(new("A", [1, 3], hit=4, run=2), more("B", 1, blocks=[5]))
    assert isinstance(taken.failed["A"], LifecycleUnsupportedError)
    assert "started again while live" in str(taken.failed["A"])
    assert_rows(taken["B"], ("B", 4, 5))


def test_a_step_that_computes_promised_rows_again_fails_alone_and_by_name(rig):
    """A resume, or a rejected draft, that nobody announced."""
    rig.run(new("A", [1, 2], run=6), new("B", [3]))
    taken = rig.run(more("A", 2, at=4), more("B", 1, blocks=[5]))
    assert isinstance(taken.failed["A"], LifecycleUnsupportedError)
    assert "position 4 again" in str(taken.failed["A"])
    assert "up to 6" in str(taken.failed["A"])
    assert_rows(taken["B"], ("B", 4, 5))


def test_a_refused_request_gives_no_rows_of_its_old_steps_away(rig):
    rig.cache.discard_step(rig.step(new("A", [1]), new("B", [2])))
    taken = rig.run(new("A", [1, 3], hit=4, run=2), more("B", 1, blocks=[5]))
    assert set(taken.failed) == {"A"}
    assert_rows(taken["B"], ("B", 0, 5))
    rig.begin(finish=["A", "B"])
    assert rig.cache.take_partial_requests() == ()


def test_a_policy_after_the_first_step_is_refused(rig):
    rig.begin(new("A", [1]))
    with pytest.raises(RuntimeError, match="register it at load"):
        rig.cache.register_policy(ModelCachePolicy(token_keys={"codes"}))
    assert_rows(rig.take(rig.save())["A"], ("A", 0, 4))
