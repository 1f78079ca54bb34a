# SPDX-License-Identifier: Apache-2.0
"""Tensor, pipeline and data parallel engines: one cache where the outputs are, and every row of every request."""

import pytest
from results import record_checked

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

HIDDEN = "__hidden_states__"
ONE_OUTPUT_RANK = ("tensor_parallel", "pipeline_parallel")


@pytest.fixture(params=[*ONE_OUTPUT_RANK, "data_parallel"])
def way(request, run_way):
    return run_way(request.param) | {"name": request.param}


@pytest.fixture(params=ONE_OUTPUT_RANK)
def one_output_rank(request, run_way):
    return run_way(request.param)


def checked_requests(way):
    return {req_id: request for of_rank in way["checked"] for req_id, request in of_rank.items()}


def test_every_row_is_one_this_run_computed_for_that_prefix(way):
    checked = checked_requests(way)
    assert len(checked) == len(way["requests"])
    for req_id, request in checked.items():
        assert request["equal_to_tap"] == request["rows"], req_id
        assert request["tokens_agree"], req_id
    record_checked(way["name"], checked)


def test_the_client_gets_every_request_whole_and_these_rows_bit_for_bit(way):
    checked = checked_requests(way)
    assert len(way["requests"]) >= 8
    for request in way["requests"]:
        [fed], [taken] = request["fed"], request["taken"]
        assert taken["ranges"] == [[0, fed]]
        assert taken["complete"]
        assert taken["tokens_are_the_clients"]
        assert taken["digests"] == checked[taken["req_id"]]["digests"]


def test_rows_the_engine_skipped_are_among_them(way):
    assert sum(request["skipped"] > 0 for request in checked_requests(way).values()) >= len(way["requests"]) // 2


def test_an_unknown_request_is_an_error_for_the_client(way):
    assert way["unknown"].startswith("UnknownRequestError: no request 'nobody'")


def test_a_refused_call_leaves_no_answer_behind_for_the_next_step(one_output_rank):
    assert one_output_rank["taken_twice"].startswith("UnknownRequestError")
    assert one_output_rank["wrong_calls"] == ["RpcArgumentError"] * 6
    assert one_output_rank["outputs_after_refusals_agree"]


@pytest.mark.parametrize(("name", "output_rank"), [("tensor_parallel", 0), ("pipeline_parallel", 1)])
def test_only_the_output_rank_has_a_cache_and_memory_for_it(run_way, name, output_rank):
    reports, checked = run_way(name)["reports"], run_way(name)["checked"]
    assert len(reports) == 2
    assert reports[output_rank]["gate"]["status"] == "supported"
    assert reports[output_rank]["cache"]["pool_reserved_bytes"] > 0
    assert checked[output_rank]
    other = reports[1 - output_rank]
    assert (other["gate"]["status"], other["gate"]["rule"]) == ("ignored", "not_output_rank")
    assert "cache" not in other
    assert not checked[1 - output_rank]


def test_samples_of_one_request_that_ran_in_both_engines_are_taken_together_and_whole(run_way):
    way = run_way("data_parallel")
    assert sum(way["samples_in_each_engine"]) == 4
    assert min(way["samples_in_each_engine"]) > 0
    taken = way["sampled"]["taken"]
    assert [one["req_id"].partition("_")[0] for one in taken] == ["0", "1", "2", "3"]
    for one, fed in zip(taken, way["sampled"]["fed"], strict=True):
        assert one["ranges"] == [[0, fed]]
        assert one["complete"]
        assert one["tokens_are_the_clients"]


def test_each_data_parallel_engine_has_its_own_cache_and_answers_for_its_own_requests(run_way):
    way = run_way("data_parallel")
    assert [report["gate"]["status"] for report in way["reports"]] == ["supported", "supported"]
    assert way["answers_of_plain_collective_rpc"] == 1
    for rank, of_engine in enumerate(way["checked"]):
        assert len(of_engine) == len(way["requests"]) // 2
        assert {request["client_req_id"].split("-")[1] for request in of_engine.values()} == {str(rank)}
