# SPDX-License-Identifier: Apache-2.0
"""A call whose wait is cut short by an exception (Ctrl-C) leaves nothing held, paused or lost."""

import threading

import pytest
from cache_rig import more, new
from controlled_runtime import PATIENCE_S, ControlledRuntime, TrackedCondition
from row_values import assert_rows

from omni_core.prefix_cache.errors import StepAlreadyMaterializedError

VICTIM = "interrupted"


class InterruptibleCondition(TrackedCondition):
    def wait_for(self, predicate, timeout_s):
        if threading.current_thread().name == VICTIM and not predicate():
            raise KeyboardInterrupt
        return super().wait_for(predicate, timeout_s)


class InterruptingRuntime(ControlledRuntime):
    """Whatever the thread `VICTIM` would have to wait for, it is interrupted instead."""

    def condition(self, lock, name):
        return InterruptibleCondition(lock, name, self)


@pytest.fixture
def make_interrupted(make_rig):
    return lambda **options: make_rig(runtime=InterruptingRuntime(), **options)


def interrupt(rig, function):
    with pytest.raises(KeyboardInterrupt):
        rig.call(VICTIM, function).result()


def test_an_interrupted_materialize_consumes_the_step_and_owes_its_rows(make_interrupted):
    rig = make_interrupted()
    rig.run(new("P", [9]))
    rig.cache.flush()
    with rig.held():
        step = rig.step(new("A", [1]), new("C", [9, 3], hit=4))
        interrupt(rig, lambda: rig.take(step))
        with pytest.raises(StepAlreadyMaterializedError):
            rig.take(step)
        assert rig.cache.stats().open_steps == 0
        assert rig.cache.stats().pinned_slots == 0
    rig.assert_nothing_held()
    taken = rig.run(more("A", 1, blocks=[2]), more("C", 1, blocks=[4]))
    assert_rows(taken["A"], ("A", 0, 5))
    assert_rows(taken["C"], ("P", 0, 4), ("C", 4, 9))
    assert rig.cache.close(PATIENCE_S) is True


def test_an_interrupted_reset_resets_nothing_and_lets_writes_go_on(make_interrupted):
    rig = make_interrupted()
    with rig.runtime.stop_at("committer.host_ready") as writing:
        steps = [rig.step(new(req_id, [ord(req_id) - 64])) for req_id in "AB"]
        writing.wait_reached()
        interrupt(rig, rig.cache.reset)
    rig.cache.flush()
    for step, req_id in zip(steps, "AB", strict=True):
        assert_rows(rig.take(step, req_id)[req_id], (req_id, 0, 4))
    assert_rows(rig.run(new("C", [2, 3], hit=4))["C"], ("B", 0, 4), ("C", 4, 8))
    rig.assert_nothing_held()


def test_a_save_interrupted_while_it_waits_for_staging_can_be_made_again(make_interrupted):
    rig = make_interrupted(staging_depth=1)
    unread = rig.step(new("U", [5]))
    rig.cache.flush()
    rig.begin(new("A", [1]), new("C", [5, 2], hit=4))
    before = rig.stats()
    interrupt(rig, rig.save)
    assert rig.stats() == before
    rig.take(unread, "U")
    taken = rig.take(rig.save())
    assert_rows(taken["A"], ("A", 0, 4))
    assert_rows(taken["C"], ("U", 0, 4), ("C", 4, 8))
    rig.assert_nothing_held()


def test_an_interrupted_flush_changes_nothing(make_interrupted):
    rig = make_interrupted()
    with rig.held():
        step = rig.step(new("A", [1]))
        interrupt(rig, rig.cache.flush)
    rig.cache.flush()
    assert_rows(rig.take(step)["A"], ("A", 0, 4))
    rig.assert_nothing_held()


def test_an_interrupted_close_can_be_tried_again(make_interrupted):
    rig = make_interrupted()
    rig.begin(new("A", [1]))
    with rig.runtime.stop_at("save_outputs.recorded") as recorded:
        saver = rig.call("saver", rig.save)
        recorded.wait_reached()
        interrupt(rig, rig.cache.close)
    with pytest.raises(RuntimeError, match="closed"):
        saver.result()
    assert rig.cache.close(PATIENCE_S) is True
