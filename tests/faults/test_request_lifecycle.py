# SPDX-License-Identifier: Apache-2.0
"""Faults 1b: finish, abort, preempt, and failures that outlive a request."""

import numpy as np
import pytest
import torch
from cache_rig import more, new
from row_values import assert_rows

from omni_core.prefix_cache.errors import CacheFailedError, RequestEventError
from omni_core.prefix_cache.events import RequestEvent, RequestEventKind
from omni_core.prefix_cache.policy import ModelCachePolicy
from omni_core.sinks.base import RequestEnd, SinkDelivery, SinkRequestEnd
from omni_core.sinks.errors import UnknownRequestError
from omni_core.sinks.memory import MemorySink
from omni_core.sinks.safetensors_files import SafetensorsSink


@pytest.mark.parametrize("sink_name", ["memory", "safetensors"])
def test_fault_021_an_aborted_requests_partial_rows_are_not_handed_on(rig, tmp_path, sink_name):
    sink = MemorySink() if sink_name == "memory" else SafetensorsSink(tmp_path)
    rows = rig.run(new("A", [5, 6]))["A"]
    sink.accept(SinkDelivery("A", None, 1, rows.ranges, rows.rows, np.arange(4, dtype=np.int64)))
    rig.begin(abort=["A"])
    sink.finish(SinkRequestEnd("A", None, RequestEnd.ABORTED))
    if sink_name == "memory":
        with pytest.raises(UnknownRequestError, match="aborted"):
            sink.request("A")
    sink.close()
    assert list(tmp_path.iterdir()) == []


def test_fault_025_a_resumed_request_without_blocks_fails_alone(rig):
    rig.run(new("A", [1]), new("B", [2]), new("C", [3]), new("D", [4]))
    resumed = RequestEvent(RequestEventKind.RESUMED, "A", block_ids=(), num_computed_tokens=0)
    step = rig.step(more("A", blocks=[5]), more("B", blocks=[6]), more("C", blocks=[7]), events=[resumed])
    taken = rig.take(step)
    assert set(taken.failed) == {"A"}
    assert isinstance(taken.failed["A"], RequestEventError)
    assert "no block list" in str(taken.failed["A"])
    assert_rows(taken["B"], ("B", 4, 5))
    assert_rows(taken["C"], ("C", 4, 5))
    assert_rows(rig.run(more("D", blocks=[8]))["D"], ("D", 4, 5))


def test_fault_027_rows_queued_before_their_block_changed_hands_stay_their_owners(rig):
    with rig.held():
        first = rig.step(new("A", [3]))
        # A lost block 3 already; the notice comes one step late.
        second = rig.step(new("E", [3]))
        third = rig.step(more("E", blocks=[4]), abort=["A"])
    assert_rows(rig.take(first, "A")["A"], ("A", 0, 4))
    assert_rows(rig.take(second, "E")["E"], ("E", 0, 4))
    assert_rows(rig.take(third, "E")["E"], ("E", 4, 5))
    assert_rows(rig.run(new("F", [3, 5], hit=4))["F"], ("E", 0, 4), ("F", 4, 8))


def test_fault_029_aborting_a_request_never_seen_is_a_no_op(rig):
    rig.run(new("A", [1]))
    before = rig.stats()
    rig.begin(abort=["never-seen"], finish=["neither"])
    assert rig.stats() == before
    assert rig.cache.take_partial_requests() == ()
    assert_rows(rig.run(more("A", blocks=[2]))["A"], ("A", 4, 5))


def test_fault_030_a_block_that_becomes_full_in_its_last_step_is_stored(rig):
    rig.run(new("A", [1, 2], run=7))
    step = rig.step(more("A", 1))
    rig.begin(new("C", [1, 2, 3], hit=8), finish=["A"])
    taken = rig.take(rig.save())
    assert_rows(taken["C"], ("A", 0, 8), ("C", 8, 12))
    assert_rows(rig.take(step, "A")["A"], ("A", 7, 8))


@pytest.mark.parametrize("saved", [False, True])
def test_fault_033_lookups_aborted_before_they_run_leave_nothing_held(rig, saved):
    rig.run(new("A", [1]))
    for number in range(1000):
        req_id = f"r{number}"
        rig.begin(new(req_id, [1, 2], hit=4))
        if saved and number % 10 == 0:
            rig.cache.discard_step(rig.save())
        rig.begin(abort=[req_id])
    rig.assert_nothing_held()
    assert rig.cache.stats().live_requests == 1
    assert_rows(rig.run(new("C", [1, 2], hit=4))["C"], ("A", 0, 4), ("C", 4, 8))


def test_fault_036_a_failed_copy_wakes_every_waiter_and_is_not_forgotten(rig):
    boom = OSError("the device lost the page")
    rig.backend.copy_gate.fail_next_copy(boom)
    with rig.held():
        first = rig.step(new("A", [5]))
        second = rig.step(new("C", [5, 6], hit=4))
        takers = [rig.taking(first, "A", thread="taker-1"), rig.taking(second, "C", thread="taker-2")]
    for taker in takers:
        with pytest.raises(CacheFailedError, match="the device lost the page") as raised:
            taker.result()
        assert raised.value.__cause__.__cause__ is boom
    with pytest.raises(CacheFailedError, match="the device lost the page"):
        rig.begin(new("D", [5, 7], hit=4))
    rig.cache.reset()
    taken = rig.run(new("D", [5, 7], hit=4), new("E", [8]))
    assert set(taken.failed) == {"D"}
    assert_rows(taken["E"], ("E", 0, 4))


def test_fault_017_an_abort_does_not_throw_deferred_rows_away(make_rig):
    rig = make_rig(keys={"mel": ((4,), torch.float32)}, policy=ModelCachePolicy(deferred_keys={"mel"}))
    rig.cache.discard_step(rig.step(new("A", [5, 6], run=8)))
    rig.begin(abort=["A"])
    rows = rig.run(new("C", [5, 6, 7], hit=8))["C"]
    assert_rows(rows, ("A", 0, 8), ("C", 8, 12))
    assert_rows(rows, ("A", 0, 8), ("C", 8, 12), key="mel", trailing=(4,))
    assert rows.zero_ranges == {}


def test_fault_035_the_cap_on_deferred_rows_holds_for_a_request_that_goes_on_and_on(make_rig):
    chunk_bytes = 4 * 4 * 4
    rig = make_rig(
        keys={"mel": ((4,), torch.float32)},
        policy=ModelCachePolicy(deferred_keys={"mel"}),
        device_staging_bytes=2 * chunk_bytes,
        staging_depth=12,
    )
    for chunk in range(10):
        rig.begin(more("A", 4) if chunk else new("A", range(1, 11)))
        assert rig.cache.stats().deferred_bytes <= 2 * chunk_bytes
        rig.save()
        assert rig.cache.stats().deferred_bytes <= 2 * chunk_bytes
    rows = rig.run(new("C", [*range(1, 11), 11], hit=40))["C"]
    assert_rows(rows, ("A", 0, 40), ("C", 40, 44), key="mel", trailing=(4,))
    assert rig.cache.stats().deferred_bytes <= 2 * chunk_bytes
