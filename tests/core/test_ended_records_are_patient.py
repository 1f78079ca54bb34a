# SPDX-License-Identifier: Apache-2.0
"""Rows that nobody waits for, because only their request's end forces them, let the engine thread finish its step."""

import pytest
from cache_rig import more, new
from controlled_runtime import ControlledRuntime, TrackedCondition
from deferred_rig import assert_both, deferred_rigs

COMMITTER = "omni-core-committer"


class EndlessCondition(TrackedCondition):
    def wait_for(self, predicate, timeout_s):
        return super().wait_for(predicate, None)


class EndlesslyPatientRuntime(ControlledRuntime):
    """The committer's bounded waits for work have no bound: what begins, somebody made begin."""

    def condition(self, lock, name):
        made = EndlessCondition if name == "committer-work" else TrackedCondition
        return made(lock, name, self)


@pytest.fixture
def make_rig():
    with deferred_rigs() as make:
        yield make


@pytest.fixture
def rig(make_rig):
    return make_rig(runtime=EndlesslyPatientRuntime())


def end_after_a_step(rig, *entering):
    """`A` has one step's rows on the device, and ends while nothing is under way."""
    rig.discard(rig.step(new("A", [1])))
    rig.settle()
    rig.begin(*entering, finish=["A"])


def leaves_the_device(rig):
    return rig.runtime.comes_true(lambda: rig.copies() == 1 and rig.on_device()[0] == 0)


def test_an_ended_requests_rows_begin_with_the_write_of_the_step_under_way(rig):
    end_after_a_step(rig, new("B", [2]))
    rig.runtime.wait_until_waiting(COMMITTER, on="committer-work")
    assert (rig.copies(), rig.on_device()[0]) == (0, 1)
    step = rig.save()
    assert rig.runtime.comes_true(lambda: rig.copies() == 1)
    assert_both(rig.take(step)["B"], ("B", 0, 4))


def test_they_wait_behind_writes_of_steps_that_have_yet_to_land(rig):
    with rig.held():
        for step in (rig.step(new("A", [1, 2])), rig.step(more("A", 4))):
            rig.discard(step)
        rig.wait_until_copying()
        rig.begin(finish=["A"])
    rig.runtime.wait_passed("committer.written", 2)
    rig.runtime.wait_until_waiting(COMMITTER, on="committer-work")
    assert (rig.copies(), rig.on_device()[0]) == (0, 2)


def test_they_begin_soon_if_no_step_is_saved(make_rig):
    rig = make_rig()
    end_after_a_step(rig)
    assert leaves_the_device(rig)


def test_a_hit_that_wants_them_does_not_wait_for_a_save(rig):
    end_after_a_step(rig, new("C", [1, 2], hit=4))
    assert leaves_the_device(rig)
    assert_both(rig.take(rig.save())["C"], ("A", 0, 4), ("C", 4, 8))


def test_neither_does_a_hit_of_a_later_step(rig):
    end_after_a_step(rig)
    rig.begin(new("C", [1, 2], hit=4))
    assert leaves_the_device(rig)
    assert_both(rig.take(rig.save())["C"], ("A", 0, 4), ("C", 4, 8))


def test_neither_does_whoever_takes_their_step(rig):
    step = rig.step(new("A", [1]))
    rig.settle()
    rig.begin(finish=["A"])
    assert_both(rig.take(step, "A")["A"], ("A", 0, 4))
    assert rig.copies() == 1


def test_neither_does_a_flush(rig):
    end_after_a_step(rig)
    rig.cache.flush()
    assert (rig.copies(), rig.on_device()[0]) == (1, 0)


def test_neither_does_a_flush_that_has_later_rows_to_force(rig):
    for step in (rig.step(new("A", [1])), rig.step(new("B", [2]))):
        rig.discard(step)
    rig.settle()
    rig.begin(finish=["A"])
    rig.cache.flush()
    assert (rig.copies(), rig.on_device()[0]) == (2, 0)


def test_several_ends_begin_together(rig):
    for step in (rig.step(new("A", [1])), rig.step(new("B", [2])), rig.step(more("A", 4, blocks=[3]))):
        rig.discard(step)
    rig.settle()
    rig.begin(finish=["B"])
    rig.begin(finish=["A"])
    rig.runtime.wait_until_waiting(COMMITTER, on="committer-work")
    assert (rig.copies(), rig.on_device()[0]) == (0, 3)
    rig.begin(new("C", [4]))
    rig.discard(rig.save())
    assert rig.runtime.comes_true(lambda: rig.copies() == 3)


def test_a_reset_drops_them_and_the_next_end_is_as_patient(rig):
    end_after_a_step(rig)
    rig.cache.reset()
    assert (rig.copies(), rig.on_device()[0]) == (0, 0)
    rig.discard(rig.step(new("B", [2])))
    rig.settle()
    rig.begin(finish=["B"])
    rig.runtime.wait_until_waiting(COMMITTER, on="committer-work")
    assert rig.copies() == 0
    rig.cache.flush()
    assert rig.copies() == 1


def test_a_cache_closes_while_they_wait(rig):
    end_after_a_step(rig)
    rig.runtime.wait_until_waiting(COMMITTER, on="committer-work")
    rig.stop()
