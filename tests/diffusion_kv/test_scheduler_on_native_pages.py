# SPDX-License-Identifier: Apache-2.0
"""The scheduler on vLLM's own pages: hits, aborts at every point, and nothing lost."""

from dataclasses import replace

import pytest
from diffusion_kv.native_pages import HIT, IDENTITY, all_free, import_native, reservations
from diffusion_kv.scheduled_requests import kv_rows, prepared, scheduler_on, wave_ids

from omni_core.diffusion_kv.rows import RowGeometry

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default"), pytest.mark.timeout(300)]

NEGATIVE = replace(IDENTITY, token_ids=tuple(range(5000, 5113)))


@pytest.fixture(scope="module", autouse=True)
def vllm():
    import_native()


@pytest.fixture
def pages():
    return reservations(40)


@pytest.fixture
def scheduler(pages):
    return scheduler_on(pages)


def add(scheduler, request_id, *identities, **shape):
    identities = identities or (IDENTITY, NEGATIVE)
    request = prepared(request_id, num_rows=len(identities), **shape)
    scheduler.add(request, kv_rows(request, identities))


def test_requests_that_come_after_step_0_hit_and_those_of_the_same_wave_do_not(scheduler, pages):
    add(scheduler, "a")
    add(scheduler, "b")
    wave = scheduler.schedule()
    assert (wave.request_ids, wave.hit_tokens) == (("a", "b"), 0)
    add(scheduler, "c")
    scheduler.acknowledge_first_step(wave)
    again = scheduler.schedule()
    assert (again.request_ids, again.hit_tokens) == (("c",), HIT)
    for request_id in "abc":
        scheduler.finish(request_id)
    assert all_free(pages)


def test_a_wave_has_one_hit_and_a_request_with_another_comes_next(scheduler, pages):
    add(scheduler, "warm")
    scheduler.schedule()
    scheduler.finish("warm")
    add(scheduler, "a")
    add(scheduler, "b", replace(IDENTITY, namespace=b"another"), NEGATIVE)
    add(scheduler, "c")
    assert scheduler.schedule().hit_tokens == HIT
    assert pages.snapshot("b") is None
    wave = scheduler.schedule()
    assert (wave.request_ids, wave.hit_tokens) == (("b",), 0)
    assert pages.stats().requests == 3


@pytest.mark.parametrize("moment", ["waiting", "running", "after step 0"])
def test_an_abort_leaves_only_what_was_final(scheduler, pages, moment):
    add(scheduler, "a")
    if moment != "waiting":
        wave = scheduler.schedule()
    if moment == "after step 0":
        scheduler.acknowledge_first_step(wave)
    removal = scheduler.abort("a")
    assert (removal is None) == (moment == "waiting")
    assert all_free(pages)
    add(scheduler, "b")
    assert scheduler.schedule().hit_tokens == (HIT if moment == "after step 0" else 0)


def test_an_oversized_request_does_not_block_the_queue(pages):
    scheduler = scheduler_on(reservations(9))
    add(scheduler, "large")
    add(scheduler, "small", IDENTITY)
    assert wave_ids(scheduler) == ("small",)
    (failed,) = scheduler.take_failed()
    assert "it needs 16 pages of 16 tokens, and the whole pool has 9" in str(failed.error)


def test_guidance_1_is_one_row_and_shares_the_pages_of_a_conditional_row(scheduler, pages):
    add(scheduler, "guided")
    scheduler.schedule()
    scheduler.finish("guided")
    add(scheduler, "plain", IDENTITY)
    wave = scheduler.schedule()
    assert wave.hit_tokens == HIT
    assert len(wave.requests[0].snapshot.rows) == 1
    scheduler.finish("plain")
    add(scheduler, "guided again")
    assert scheduler.schedule().hit_tokens == HIT


def test_a_wave_that_waits_for_pages_starts_when_they_come_back(scheduler, pages):
    for request_id in "abc":
        add(scheduler, request_id)
    assert wave_ids(scheduler) == ("a", "b")  # 16 pages each, of 40
    assert wave_ids(scheduler) == ()
    scheduler.finish("a")
    assert wave_ids(scheduler) == ("c",)
    assert pages.stats().free_pages == 40 - 16 - 16 + 0


def test_preemption_keeps_the_pages_and_the_generation(scheduler, pages):
    add(scheduler, "a")
    wave = scheduler.schedule()
    scheduler.preempt("a", completed_steps=2)
    again = scheduler.schedule()
    assert again.requests[0].snapshot is wave.requests[0].snapshot is pages.snapshot("a")
    assert pages.stats().requests == 1
    scheduler.finish("a")
    assert all_free(pages)


def test_lengths_are_kept_apart(scheduler):
    add(scheduler, "a", IDENTITY)
    add(scheduler, "b", IDENTITY, geometry=RowGeometry(70, 38, 111))
    assert wave_ids(scheduler) == ("a",)
    assert wave_ids(scheduler) == ("b",)
