# SPDX-License-Identifier: Apache-2.0
"""No thread computes, waits or takes a further lock while it holds one."""

import pytest
import torch
from budget_deferred_loads import DeferringUnderPressure, FinishingDeferred
from budget_loads import WARM_UP_STEPS
from budget_plain_loads import Carrying, Decoding, Drafting, Hitting, Prefilling
from operation_counts import WatchedRuntime

LOADS = [Decoding, Prefilling, Hitting, Drafting, Carrying, DeferringUnderPressure]


@pytest.mark.parametrize("load", LOADS)
def test_no_thread_computes_waits_or_takes_a_lock_while_it_holds_one(make_rig, load):
    working = load(make_rig, 16)
    with working.runtime.watched():
        for _ in range(WARM_UP_STEPS):
            working.step()
        working.rig.cache.stats()
        working.rig.cache.reset()
    assert working.runtime.breaches == []


def test_nor_does_any_when_a_deferred_request_ends(make_rig):
    working = FinishingDeferred(make_rig, 16, num_waiting=3)
    with working.runtime.watched():
        working.step()
    assert working.runtime.breaches == []


def test_the_watch_notices_what_is_done_under_a_lock():
    runtime = WatchedRuntime()
    outer, inner = runtime.lock("outer"), runtime.lock("inner")
    condition = runtime.condition(inner, "condition")
    with runtime.watched():
        torch.zeros(1)
        with inner:
            condition.wait_for(lambda: False, 0.001)
        assert runtime.breaches == []
        with outer:
            torch.zeros(1)
            with inner:
                condition.wait_for(lambda: False, 0.001)
    done = [breach.partition(": ")[2] for breach in runtime.breaches]
    assert done == [
        "aten.zeros.default while holding outer",
        "takes lock 'inner' while holding outer",
        "waits for 'condition' while holding outer",
    ]
