# SPDX-License-Identifier: Apache-2.0
"""The counters behind the operation budgets count what they say, and the assertion on growth can fail."""

import gc
import sys

import pytest
import torch
from operation_costs import Budget, Cost, CountedRuntime, assert_costs
from operation_counts import calls_made_by, torch_operations

import omni_core
from omni_core.backend.memory import tensor_nbytes

PATIENCE_S = 30.0


def test_torch_counts_tell_memory_of_its_own_from_views_and_copies():
    source, target = torch.zeros(4), torch.zeros(4)
    with torch_operations() as counted:
        target.copy_(source)
        source[:2].view(2, 1)
    assert (counted.total, counted.new_storages) == (3, 0)
    with torch_operations() as counted:
        source.clone()
    assert (counted.total, counted.new_storages) == (1, 1)


def test_calls_are_counted_where_our_code_makes_them():
    with calls_made_by(omni_core) as counted:
        len(())
    assert (counted.python, counted.c) == (0, 0)
    with calls_made_by(omni_core) as counted:
        tensor_nbytes((2, 3), torch.int8)
    assert (counted.python, counted.c) == (1, 1), "itself, and `math.prod` in it"


def test_a_garbage_collection_does_not_come_into_a_counted_block():
    """Its callbacks, and finalizers, would count as calls of the code it interrupts. hypothesis installs a callback."""
    collections = []

    def note(phase, info):
        collections.append(phase)

    thresholds = gc.get_threshold()
    gc.callbacks.append(note)
    try:
        with calls_made_by(omni_core) as counted:
            gc.set_threshold(1)
            kept = [[] for _ in range(100)]
            tensor_nbytes((2, 3), torch.int8)
            gc.set_threshold(*thresholds)
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*thresholds)
    assert len(kept) == 100
    assert collections == []
    assert (counted.python, counted.c) == (1, 1)
    assert gc.isenabled()


def test_counting_calls_leaves_another_profile_as_it_was():
    seen = []

    def profile(frame, event, argument):
        seen.append(event)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        with calls_made_by(omni_core):
            tensor_nbytes((2, 3), torch.int8)
        assert sys.getprofile() is profile
    finally:
        sys.setprofile(before)


def test_counting_torch_operations_adds_no_calls():
    """Indexing a tensor calls Python code of the dispatcher while a counter is on."""
    runtime = CountedRuntime()
    with runtime.metered() as meter, runtime.lock("lock"):
        torch.zeros(4)[:2]
        tensor_nbytes((2, 3), torch.int8)
    assert meter.cost == Cost(torch_ops=2, locks=1, python_calls=1, c_calls=1)


def test_a_helper_thread_is_counted_apart_and_without_the_locks_of_the_simulator():
    runtime = CountedRuntime()

    def work():
        with runtime.lock("own"), runtime.lock("cpu_sim.stream.copy"):
            tensor_nbytes((2, 3), torch.int8)
        torch.zeros(4)

    assert runtime.spawn("helper", work).join(PATIENCE_S)
    assert runtime.spent_by("helper") == Cost(torch_ops=1, locks=1, python_calls=1, c_calls=1)


def test_growth_that_a_budget_does_not_name_is_noticed():
    fixed, each = Cost(1, 2, 3, 4), Cost(0, 0, 1, 1)
    growing = {size: fixed + each * size for size in (1, 4, 16)}
    assert_costs(growing, Budget(fixed, each, "request"))
    assert_costs(dict.fromkeys((1, 4, 16), fixed + each * 4), Budget(fixed, each, "request").of(4))
    with pytest.raises(AssertionError, match=r"may grow with nothing; at 4: .*; at 16: "):
        assert_costs(growing, Budget(fixed + each))
    with pytest.raises(AssertionError, match="may grow with request; at 16: "):
        assert_costs(growing | {16: fixed + each * 17}, Budget(fixed, each, "request"))
    with pytest.raises(AssertionError):
        assert_costs(growing, Budget(fixed + Cost(torch_ops=1), each, "request"))
