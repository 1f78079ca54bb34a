# SPDX-License-Identifier: Apache-2.0
"""vLLM's OpenAI server: concurrent streams of which some break off, rows over HTTP or in files, and three ends."""

import pytest
from results import record_checked

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

HIDDEN = "__hidden_states__"
LEAVERS = {"cold-3", "warm-3"}
WAYS = ("rows_in_memory", "terminated", "killed")
WITH_FILES = ("terminated", "killed")


@pytest.fixture(params=WAYS)
def way(request, run_way):
    return run_way(request.param, script="run_server.py")


@pytest.fixture(params=WITH_FILES)
def with_files(request, run_way):
    return run_way(request.param, script="run_server.py")


@pytest.fixture
def rows_in_memory(run_way):
    return run_way("rows_in_memory", script="run_server.py")


def test_every_row_is_one_this_run_computed_for_that_prefix(way):
    assert set(way["req_ids"].values()) == set(way["checked"])
    assert len(way["checked"]) == 16
    for req_id, request in way["checked"].items():
        assert request["equal_to_tap"] == request["rows"], req_id
        assert request["tokens_agree"], req_id
        assert request["missing"] == [], req_id
    record_checked("server", way["checked"])


def test_clients_that_stay_get_every_token_and_their_requests_every_row(way):
    stayed = {name: client for name, client in way["clients"].items() if name not in LEAVERS}
    assert len(stayed) == 14
    for name, client in stayed.items():
        assert client["finished"], name
        fed = client["prompt_tokens"] + client["received_tokens"] - 1
        assert way["checked"][way["req_ids"][name]]["ranges"] == [[0, fed]], name


def test_the_request_of_a_client_that_leaves_ends_early_with_the_rows_there_are(way):
    for name in LEAVERS:
        assert not way["clients"][name]["finished"]
        [[start, stop]] = way["checked"][way["req_ids"][name]]["ranges"]
        assert start == 0
        assert way["clients"][name]["prompt_tokens"] < stop < way["clients"][name]["prompt_tokens"] + 379


def test_concurrent_streams_hit_what_the_others_computed(way):
    assert sum(request["skipped"] for request in way["checked"].values()) >= 15 * 96


def test_no_process_of_the_server_is_left(way):
    assert way["ended"]["left"] == []


def test_rows_come_over_http_bit_for_bit_by_the_id_of_the_response(rows_in_memory):
    assert len(rows_in_memory["taken"]) == 16
    for name, taken in rows_in_memory["taken"].items():
        req_id = rows_in_memory["req_ids"][name]
        assert taken == [{"req_id": req_id, "digests": rows_in_memory["checked"][req_id]["digests"]}], name


def test_an_unknown_request_and_a_wrong_call_are_answers_and_the_server_goes_on(rows_in_memory):
    assert rows_in_memory["unknown"].startswith("no request 'nobody'")
    [reply] = rows_in_memory["wrong_call"]
    assert reply["error"]["type"] == "RpcArgumentError"
    assert rows_in_memory["answering_after"] == 200


def test_a_flush_is_one_plain_call(rows_in_memory):
    [reply] = rows_in_memory["plain_flush"]
    assert (reply["error"], reply["done"]) == (None, True)


def test_nothing_failed_and_nothing_is_held(rows_in_memory):
    report = rows_in_memory["report"]
    assert report["delivery"]["failures"] == report["delivery"]["sink_errors"] == {}
    held = ("open_steps", "live_reads", "pinned_slots", "queued_writes", "staging_slots_in_use")
    assert {name: report["cache"][name] for name in held} == dict.fromkeys(held, 0)


def test_files_hold_what_was_checked_and_are_found_by_the_id_of_the_response(with_files):
    for name, req_id in with_files["req_ids"].items():
        assert with_files["files"][req_id]["digests"] == with_files["checked"][req_id]["digests"], name
        assert with_files["by_client"][name] == [req_id], name


def test_sigterm_ends_the_server_with_status_0_and_the_rows_of_the_request_in_flight(run_way):
    way = run_way("terminated", script="run_server.py")
    assert way["ended"]["code"] == 0
    assert way["partial_files"] == []
    assert way["long"]["finished"]
    [in_flight] = [request for req_id, request in way["files"].items() if req_id not in way["checked"]]
    assert in_flight["complete"]
    assert in_flight["ranges"] == [[0, way["long"]["prompt_tokens"] + way["long"]["received_tokens"] - 1]]


def test_kill_9_of_the_worker_leaves_no_partial_request_readable(run_way):
    way = run_way("killed", script="run_server.py")
    assert not way["long"]["finished"]
    assert set(way["files"]) == set(way["checked"])
