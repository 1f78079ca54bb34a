# SPDX-License-Identifier: Apache-2.0
"""How requests end: what is published, that pages come back once, and what the worker is told to drop."""

import pytest
from diffusion_kv.scheduled_requests import PagesOnPaper, add, prepared, queued, wave_ids

from omni_core.diffusion_kv.errors import DiffusionKVError
from omni_core.integrations.diffusion.request_states import LEGAL_MOVES, RequestStatus
from omni_core.integrations.diffusion.waves import KVRemoval


@pytest.fixture
def pages():
    return PagesOnPaper()


def test_a_prefix_is_published_after_step_0_and_pages_come_back_at_the_end(pages):
    scheduler = queued(pages, *map(prepared, "ab"))
    wave = scheduler.schedule()
    scheduler.acknowledge_first_step(wave)
    assert pages.calls[2:] == [("publish", "a"), ("publish", "b")]
    assert scheduler.finish("a") == KVRemoval("a", 1)
    assert list(pages.live) == ["b"]


def test_without_an_acknowledgement_the_prefix_is_published_at_the_end(pages):
    scheduler = queued(pages, prepared("a"))
    scheduler.schedule()
    scheduler.finish("a")
    assert pages.calls == [("reserve", "a"), ("publish", "a"), ("free", "a")]


def test_an_abort_in_the_queue_drops_the_request_and_tells_the_worker_nothing(pages):
    scheduler = queued(pages, *map(prepared, "abc"))
    assert scheduler.abort("b") is None
    assert wave_ids(scheduler) == ("a", "c")


def test_an_abort_before_step_0_is_acknowledged_publishes_nothing(pages):
    scheduler = queued(pages, *map(prepared, "ab"))
    wave = scheduler.schedule()
    assert scheduler.abort("a") == KVRemoval("a", 1)
    scheduler.acknowledge_first_step(wave)
    assert pages.calls[2:] == [("free", "a"), ("publish", "b")]
    assert scheduler.num_running == 1


def test_an_abort_after_step_0_leaves_what_was_published(pages):
    scheduler = queued(pages, prepared("a"))
    scheduler.acknowledge_first_step(scheduler.schedule())
    scheduler.abort("a")
    assert pages.calls == [("reserve", "a"), ("publish", "a"), ("free", "a")]


def test_a_request_that_broke_publishes_nothing_and_gives_its_pages_back(pages):
    scheduler = queued(pages, *map(prepared, "ab"))
    wave = scheduler.schedule()
    assert scheduler.fail("a") == KVRemoval("a", 1)
    scheduler.acknowledge_first_step(wave)
    assert ("publish", "a") not in pages.calls
    assert list(pages.live) == ["b"]


def test_an_abort_of_a_preempted_request_gives_its_pages_back(pages):
    scheduler = queued(pages, prepared("a"))
    scheduler.schedule()
    scheduler.preempt("a", completed_steps=1)
    assert scheduler.abort("a") == KVRemoval("a", 1)
    assert pages.live == {}
    assert wave_ids(scheduler) == ()


def test_an_abort_that_comes_late_is_let_pass(pages):
    scheduler = queued(pages, prepared("a"))
    scheduler.schedule()
    scheduler.finish("a")
    assert scheduler.abort("a") is None
    assert pages.calls.count(("free", "a")) == 1


def test_a_late_acknowledgement_is_not_taken_for_a_later_request_of_the_same_id(pages):
    request = prepared("a")
    scheduler = queued(pages, request)
    wave = scheduler.schedule()
    scheduler.abort("a")
    add(scheduler, request)
    scheduler.acknowledge_first_step(wave)
    scheduler.schedule()
    scheduler.acknowledge_first_step(wave)
    assert ("publish", "a") not in pages.calls


@pytest.mark.parametrize("call", ["finish", "fail", "preempt"])
@pytest.mark.parametrize("state", ["waiting", "not live"])
def test_only_running_requests_finish_fail_or_are_preempted(pages, call, state):
    scheduler = queued(pages, *([prepared("a")] if state == "waiting" else []))
    extra = {"completed_steps": 1} if call == "preempt" else {}
    with pytest.raises(DiffusionKVError, match=f"{call}: request 'a' is {state}, not running"):
        getattr(scheduler, call)("a", **extra)


def test_every_state_but_the_ends_has_a_way_out_and_no_end_has_one():
    ends = {state for state in RequestStatus if not LEGAL_MOVES[state]}
    assert ends == {RequestStatus.COMPLETED, RequestStatus.ABORTED, RequestStatus.FAILED}
    assert all(RequestStatus.ABORTED in LEGAL_MOVES[state] for state in set(RequestStatus) - ends)
