# SPDX-License-Identifier: Apache-2.0
"""Requests become waves first come, first served; one that cannot join waits, and nobody overtakes it."""

import pytest
from diffusion_kv.scheduled_requests import (
    PagesOnPaper,
    adapter,
    add,
    kv_rows,
    prepared,
    queued,
    scheduler_on,
    wave_ids,
)

from omni_core.diffusion_kv.errors import DiffusionKVError, RequestRefusedError
from omni_core.diffusion_kv.rows import RowGeometry
from omni_core.integrations.diffusion.request_states import RequestStatus


def test_requests_alike_share_a_wave_in_order_of_arrival():
    scheduler = queued(PagesOnPaper(hits=dict.fromkeys("abc", 64)), *map(prepared, "abc"))
    wave = scheduler.schedule()
    assert wave.request_ids == ("a", "b", "c")
    assert wave.hit_tokens == 64
    assert [scheduled.snapshot.request_id for scheduled in wave.requests] == ["a", "b", "c"]
    assert (scheduler.num_waiting, scheduler.num_running) == (0, 3)


@pytest.mark.parametrize(
    "other",
    [
        prepared("b", geometry=RowGeometry(71, 40, 114)),
        prepared("b", num_rows=1),
        prepared("b", steps=4),
        prepared("b", lora=adapter(scale=0.5)),
        prepared("b", lora=adapter(lora_id=2)),
        prepared("b"),
    ],
    ids=["layout", "rows", "steps", "adapter scale", "adapter", "no adapter"],
)
def test_one_that_differs_waits_for_the_next_wave_and_is_not_overtaken(other):
    scheduler = queued(PagesOnPaper(), prepared("a", lora=adapter()), other, prepared("c", lora=adapter()))
    assert wave_ids(scheduler) == ("a",)
    assert wave_ids(scheduler) == ("b",)
    assert wave_ids(scheduler) == ("c",)


def test_another_hit_waits_for_the_next_wave_and_holds_no_pages_meanwhile():
    pages = PagesOnPaper(hits={"a": 64, "b": 48, "c": 64})
    scheduler = queued(pages, *map(prepared, "abc"))
    assert wave_ids(scheduler) == ("a",)
    assert list(pages.live) == ["a"]
    pages.hits["b"] = 64  # by the time of the next wave more is published
    assert wave_ids(scheduler) == ("b", "c")


def test_waves_and_running_requests_are_bounded():
    scheduler = queued(PagesOnPaper(), *map(prepared, "abcdef"), max_wave_requests=2, max_running_requests=3)
    assert wave_ids(scheduler) == ("a", "b")
    assert wave_ids(scheduler) == ("c",)
    assert wave_ids(scheduler) == ()
    scheduler.finish("b")
    assert wave_ids(scheduler) == ("d",)


def test_a_full_pool_holds_up_the_queue_until_pages_come_back():
    scheduler = queued(PagesOnPaper(free_pages=1), prepared("a"), prepared("b"), prepared("c", steps=2))
    assert wave_ids(scheduler) == ("a",)
    assert wave_ids(scheduler) == ()
    assert scheduler.num_waiting == 2
    scheduler.finish("a")
    assert wave_ids(scheduler) == ("b",)


def test_one_that_can_never_be_served_gets_its_error_and_the_others_go_on():
    scheduler = queued(PagesOnPaper(never={"a", "c"}), *map(prepared, "abcd"))
    assert wave_ids(scheduler) == ("b", "d")
    failed = scheduler.take_failed()
    assert [one.prepared.request.request_id for one in failed] == ["a", "c"]
    assert "too large" in str(failed[0].error)
    assert scheduler.take_failed() == ()
    assert scheduler.status("a") is None


def test_a_queue_of_hopeless_requests_gives_errors_and_no_wave():
    scheduler = queued(PagesOnPaper(never={"a"}), prepared("a"))
    assert wave_ids(scheduler) == ()
    assert len(scheduler.take_failed()) == 1


def test_nothing_to_do_is_no_wave():
    assert scheduler_on(PagesOnPaper()).schedule() is None


def test_lost_pages_are_an_error_rather_than_a_wait_for_ever():
    scheduler = queued(PagesOnPaper(free_pages=0), prepared("a"))
    with pytest.raises(DiffusionKVError, match="'a' waits for pages, and no request holds any"):
        scheduler.schedule()


class BreakingPages(PagesOnPaper):
    """Breaks at the request of `breaks_at`."""

    breaks_at = "c"

    def reserve(self, request_id, rows, **at):
        if request_id == self.breaks_at:
            raise KeyError("broken")
        return super().reserve(request_id, rows, **at)


def test_a_reservation_that_breaks_leaves_the_queue_as_it_was():
    pages = BreakingPages()
    scheduler = queued(pages, *map(prepared, "abc"))
    with pytest.raises(KeyError, match="broken"):
        scheduler.schedule()
    assert pages.live == {}
    assert (scheduler.num_waiting, scheduler.num_running) == (3, 0)
    assert scheduler.status("a") is RequestStatus.WAITING
    pages.breaks_at = None
    assert wave_ids(scheduler) == ("a", "b", "c")


def test_it_leaves_a_preempted_request_its_pages():
    pages = BreakingPages()
    scheduler = queued(pages, prepared("a"))
    snapshot = scheduler.schedule().requests[0].snapshot
    scheduler.preempt("a", completed_steps=0)
    add(scheduler, prepared("b"), prepared("c"))
    with pytest.raises(KeyError, match="broken"):
        scheduler.schedule()
    assert list(pages.live) == ["a"]
    pages.breaks_at = None
    assert scheduler.schedule().requests[0].snapshot is snapshot


def test_a_preempted_request_goes_on_with_the_pages_it_has():
    pages = PagesOnPaper(hits={"a": 64})
    scheduler = queued(pages, prepared("a"), prepared("b", steps=2))
    wave = scheduler.schedule()
    scheduler.preempt("a", completed_steps=3)
    assert scheduler.status("a") is RequestStatus.PREEMPTED
    again = scheduler.schedule()
    assert again.requests[0].snapshot is wave.requests[0].snapshot
    assert again.forward_key.completed_steps == 3
    assert pages.calls == [("reserve", "a")]
    assert again.wave_id > wave.wave_id


def test_preempted_requests_come_back_in_order_of_arrival_and_only_with_their_like():
    scheduler = queued(PagesOnPaper(), *map(prepared, "abc"), max_wave_requests=3)
    scheduler.schedule()
    add(scheduler, prepared("d"))
    for request_id, steps in (("c", 2), ("a", 2), ("b", 5)):
        scheduler.preempt(request_id, completed_steps=steps)
    assert wave_ids(scheduler) == ("a",)
    assert wave_ids(scheduler) == ("b",)
    assert wave_ids(scheduler) == ("c",)
    assert wave_ids(scheduler) == ("d",)


def test_dense_requests_share_waves_without_pages():
    scheduler = scheduler_on(None)
    for request_id in "ab":
        scheduler.add(prepared(request_id))
    wave = scheduler.schedule()
    assert wave.request_ids == ("a", "b")
    assert wave.hit_tokens == 0
    assert wave.requests[0].snapshot is None
    scheduler.acknowledge_first_step(wave)
    assert scheduler.finish("a") is None
    assert scheduler.abort("b") is None
    assert scheduler.num_running == 0


def test_one_row_of_guidance_1_and_two_rows_run_in_waves_of_their_own():
    scheduler = queued(PagesOnPaper(), prepared("a", num_rows=1), prepared("b", num_rows=1), prepared("c"))
    wave = scheduler.schedule()
    assert wave.request_ids == ("a", "b")
    assert [len(scheduled.snapshot.rows) for scheduled in wave.requests] == [1, 1]
    assert wave_ids(scheduler) == ("c",)


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (prepared("b", num_rows=3), r"request 'b': 3 rows, and the stage was profiled for at most 2"),
        (prepared("b", num_rows=0), r"request 'b': it has no row"),
        (prepared("b", geometry=RowGeometry(150, 40, 201)), r"201 tokens in a row, .* at most 200"),
        (prepared("b", geometry=RowGeometry(70, 61, 131)), r"61 target tokens in a row, .* at most 60"),
        (prepared("a"), r"request 'a': a request of this id is live"),
    ],
)
@pytest.mark.parametrize("call", ["check", "add"])
def test_what_is_refused_on_arrival_changes_nothing(request_, says, call):
    scheduler = queued(PagesOnPaper(), prepared("a"))
    with pytest.raises(RequestRefusedError, match=says):
        scheduler.check(request_) if call == "check" else scheduler.add(request_, kv_rows(request_))
    assert wave_ids(scheduler) == ("a",)
    assert scheduler.num_waiting == 0


def test_kv_rows_on_a_dense_stage_are_refused():
    with pytest.raises(RequestRefusedError, match="2 KV rows, and the stage runs diffusion_kv_mode=dense_legacy"):
        add(scheduler_on(None), prepared("a"))


@pytest.mark.parametrize(
    "rows",
    [[], kv_rows(prepared("a", num_rows=1)), kv_rows(prepared("a", geometry=RowGeometry(70, 40, 112)))],
    ids=["none", "too few", "other lengths"],
)
def test_a_paged_stage_wants_one_kv_row_for_each_row(rows):
    with pytest.raises(RequestRefusedError, match="diffusion_kv_mode=paged_scheduler needs one for each"):
        scheduler_on(PagesOnPaper()).add(prepared("a"), rows)


def test_an_id_is_free_again_once_its_request_has_ended():
    pages = PagesOnPaper()
    scheduler = queued(pages, prepared("a"))
    scheduler.schedule()
    first = scheduler.finish("a")
    add(scheduler, prepared("a"))
    scheduler.schedule()
    assert scheduler.abort("a").generation > first.generation
