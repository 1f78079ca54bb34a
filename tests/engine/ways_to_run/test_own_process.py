# SPDX-License-Identifier: Apache-2.0
"""An engine in processes of its own: its rows, flushes and refusals come over `collective_rpc`."""

import pytest
from results import record_checked

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

HIDDEN, CODES = "__hidden_states__", "talker.codes"


@pytest.fixture(scope="module")
def seen(run_way):
    return run_way("own_process")


@pytest.fixture(scope="module")
def checked(seen):
    [of_waves] = seen["checked"]
    return of_waves | seen["checked_later"]


@pytest.fixture(scope="module")
def requests(seen):
    return [*seen["requests"], seen["long"], seen["sampled"]]


def test_every_row_is_one_this_run_computed_for_that_prefix(checked):
    assert len(checked) == 12
    for req_id, request in checked.items():
        assert request["equal_to_tap"] == request["rows"], req_id
        assert request["tokens_agree"], req_id
        assert set(request["rows"]) == {HIDDEN, CODES}, req_id
    record_checked("own_process", checked)


def test_the_client_gets_these_rows_bit_for_bit_and_whole(checked, requests):
    assert len(requests) == 10
    for request in requests:
        assert len(request["taken"]) == len(request["fed"])
        for fed, taken in zip(request["fed"], request["taken"], strict=True):
            assert taken["ranges"] == [[0, fed]], request["request_id"]
            assert taken["complete"]
            assert taken["tokens_are_the_clients"]
            assert taken["dtype"] == "torch.bfloat16"
            assert taken["digests"] == checked[taken["req_id"]]["digests"]


def test_rows_the_engine_skipped_are_among_them(checked):
    assert sum(request["skipped"] > 0 for request in checked.values()) >= 9


def test_a_flush_while_a_request_runs_does_not_end_it(seen):
    assert seen["open_during_flush"] == 1
    assert seen["running"].startswith("RequestNotEndedError")
    assert seen["long"]["taken"][0]["ranges"] == [[0, *seen["long"]["fed"]]]


def test_both_samples_of_a_request_are_taken_by_its_id(seen):
    assert {one["req_id"].split("_")[0] for one in seen["sampled"]["taken"]} == {"0", "1"}


def test_a_refused_call_is_an_error_for_the_client_and_nothing_for_the_engine(seen):
    assert seen["unknown"].startswith("UnknownRequestError: no request 'nobody'")
    assert seen["taken_twice"].startswith("UnknownRequestError")
    assert seen["wrong_calls"] == ["RpcArgumentError"] * 3
    assert seen["flush_of_text"]["type"] == "RpcArgumentError"
    assert seen["outputs_after_refusals_agree"]


def test_the_report_crosses_too(seen):
    [report] = seen["reports"]
    assert report["gate"]["status"] == "supported"
    assert report["delivery"]["failures"] == {}
