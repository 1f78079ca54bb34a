# SPDX-License-Identifier: Apache-2.0
"""A real vLLM whose sampled tokens come late delivers right rows: asynchronous scheduling, and the second model runner.

On the CPU; the same runner code runs on CUDA. Each way runs in a process of its own, first with Omni Core and then on
an engine without prefix caching.
"""

from pathlib import Path

import pytest
from engine_program import run_engine_program

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

HERE = Path(__file__).parent
HIDDEN, CODES = "__hidden_states__", "talker.codes"
RUNNERS = {"V1": "vllm.v1.worker.cpu_model_runner", "V2": "vllm.v1.worker.cpu.model_runner"}
WAYS = [("V1", "async"), ("V2", "async"), ("V2", "drafts")]


@pytest.fixture(scope="module", params=WAYS, ids=" ".join)
def way(request, tmp_path_factory):
    runner, name = request.param
    result = tmp_path_factory.mktemp("late") / f"{runner}-{name}.json"
    return request.param, run_engine_program(HERE / "late_tokens.py", name, result, timeout_s=800, RUNNER=runner)


@pytest.fixture
def ran(way):
    return way[1]


def test_the_engine_ran_as_it_was_to(way):
    (runner, name), ran = way
    assert ran["runner"] == RUNNERS[runner]
    assert ran["async_scheduling"] == (name == "async")


def test_drafts_were_accepted_and_rejected_where_there_were_any(way):
    (_, name), ran = way
    assert (ran["drafts"] > 0) == (name == "drafts")
    if name == "drafts":
        assert ran["drafts_accepted"] >= 10
        assert ran["drafts_replaced"] >= 10


def test_every_request_is_delivered_and_nothing_failed(ran):
    assert all(seen["delivered"] for seen in ran["requests"].values())
    assert ran["report"]["delivery"]["failures"] == {}
    assert ran["report"]["off_reason"] is None
    assert ran["tap_failure"] is None


def test_every_delivered_row_is_one_this_run_computed_for_that_prefix(ran):
    for name, seen in ran["requests"].items():
        assert seen["equal_to_tap"] == seen["rows"], name


def test_every_delivered_row_equals_the_run_without_prefix_caching(ran):
    for name, seen in ran["requests"].items():
        assert seen["equal_to_cache_off"] == seen["rows"], name


def test_every_row_comes_once_with_its_token_though_that_was_known_later(ran):
    for name, seen in ran["requests"].items():
        if name != "aborted":
            whole = seen["prompt_tokens"] + seen["output_tokens"] - 1
            assert seen["ranges"] == [[0, whole]], name
            assert seen["rows"] == {HIDDEN: whole, CODES: whole}, name
            assert seen["client_tokens_agree"], name


def test_the_cache_changes_no_token_the_engine_generates(ran):
    assert all(seen["outputs_agree"] for seen in ran["requests"].values())


def test_a_request_that_a_stop_token_ended_has_no_row_of_a_step_run_before_that_was_known(ran):
    stopped = ran["requests"]["stopped"]
    assert stopped["done"]
    assert stopped["output_tokens"] < 12
    assert stopped["ranges"] == [[0, stopped["prompt_tokens"] + stopped["output_tokens"] - 1]]


def test_an_aborted_request_keeps_the_rows_that_were_computed_before(ran):
    aborted = ran["requests"]["aborted"]
    [[start, stop]] = aborted["ranges"]
    assert start == 0
    assert stop >= aborted["prompt_tokens"] + aborted["output_tokens"] - 1


def test_prefixes_were_hit_and_requests_were_preempted(ran):
    assert ran["report"]["cache"]["rows_from_hits"] >= 500
    assert ran["preemptions"] >= 1


def test_the_cache_sees_every_real_forward_and_no_dummy_run(ran):
    assert ran["report"]["cache"]["steps_saved"] == ran["forwards"]


def test_nothing_is_held_once_everything_was_delivered(ran):
    cache = ran["report"]["cache"]
    held = ("open_steps", "live_reads", "pinned_slots", "queued_writes", "staging_slots_in_use")
    assert {name: cache[name] for name in held} == dict.fromkeys(held, 0)
