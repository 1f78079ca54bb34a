# SPDX-License-Identifier: Apache-2.0
"""The client's id behind the id a worker sees, and when an id is one of several samples'."""

import pytest

from omni_core.integrations.vllm.request_ids import (
    ClientRequest,
    chat_client_req_id,
    client_request,
    completion_client_req_id,
)
from omni_core.sinks.base import PossibleSample
from omni_core.sinks.request_index import RequestIndex, RequestNames


@pytest.mark.parametrize(
    ("req_id", "client"),
    [
        ("a-81bdb22f", "a"),
        ("0-a2e2073e", "0"),
        ("chatcmpl-9f2-81bdb22f", "chatcmpl-9f2"),
        ("with spaces/and\nlines-00000000", "with spaces/and\nlines"),
        ("a-81bdb22f-12345678", "a-81bdb22f"),
        ("_a-81bdb22f", "_a"),
        ("00_a-81bdb22f", "00_a"),
        ("-81bdb22f", ""),
        ("1234567890_a-81bdb22f", "1234567890_a"),
    ],
)
def test_the_random_suffix_comes_off(req_id, client):
    assert client_request(req_id) == ClientRequest(client, None)


@pytest.mark.parametrize(
    ("req_id", "name", "sample"),
    [
        ("0_0-81bdb22f", "0_0", PossibleSample("0", "0-81bdb22f", 0)),
        ("13_my request-81bdb22f", "13_my request", PossibleSample("my request", "my request-81bdb22f", 13)),
        ("1_-81bdb22f", "1_", PossibleSample("", "-81bdb22f", 1)),
        ("999999999_a-81bdb22f", "999999999_a", PossibleSample("a", "a-81bdb22f", 999999999)),
        ("1_0_a-81bdb22f", "1_0_a", PossibleSample("0_a", "0_a-81bdb22f", 1)),
    ],
)
def test_an_id_of_a_samples_form_keeps_its_name_and_says_whose_sample_it_may_be(req_id, name, sample):
    assert client_request(req_id) == ClientRequest(name, sample)


@pytest.mark.parametrize("req_id", ["", "a", "a-81bdb22", "a-81BDB22F", "a_81bdb22f", "81bdb22f", "a-81bdb22f "])
def test_an_id_of_another_form_has_no_known_client(req_id):
    assert client_request(req_id) is None


def test_an_id_of_more_digits_than_python_reads_is_a_clients_own():
    digits = "9" * 5000
    assert client_request(f"{digits}_x-81bdb22f") == ClientRequest(f"{digits}_x", None)


def test_requests_with_an_empty_client_id_are_found_under_it():
    assert indexed("-81bdb22f").find("") == ("-81bdb22f",)
    assert indexed("0_-81bdb22f", "1_-81bdb22f").find("") == ("0_-81bdb22f", "1_-81bdb22f")


def test_an_engine_that_does_not_randomise_keeps_the_clients_id():
    assert client_request("a-81bdb22f", randomised=False) == ClientRequest("a-81bdb22f", None)
    assert client_request("1_a", randomised=False) == ClientRequest("1_a", PossibleSample("a", "a", 1))


def indexed(*req_ids, randomised=True):
    index = RequestIndex()
    for req_id in req_ids:
        client = client_request(req_id, randomised=randomised)
        index.add(req_id, RequestNames(req_id, client.client_req_id, client.sample))
    return index


def test_a_clients_own_id_is_not_taken_for_a_sample():
    index = indexed("0_foo-81bdb22f", "1_foo-00000000", "foo-11111111")
    assert index.find("foo") == ("foo-11111111",)
    assert index.find("0_foo") == ("0_foo-81bdb22f",)


def test_samples_of_one_request_are_found_under_its_id_and_each_under_its_own():
    index = indexed("0_foo-81bdb22f", "1_foo-81bdb22f", "2_foo-81bdb22f", "0_foo-00000000")
    samples = ("0_foo-81bdb22f", "1_foo-81bdb22f", "2_foo-81bdb22f")
    assert index.by_client_id("foo") == samples
    assert index.find("1_foo") == ("1_foo-81bdb22f",)
    assert set(index.find("0_foo")) == {"0_foo-81bdb22f", "0_foo-00000000"}
    assert index.find("0_foo-81bdb22f") == ("0_foo-81bdb22f",)


def test_a_sample_whose_siblings_were_forgotten_stays_a_sample():
    index = indexed("0_foo-81bdb22f", "1_foo-81bdb22f")
    index.discard("0_foo-81bdb22f")
    assert index.find("foo") == ("1_foo-81bdb22f",)
    index.discard("1_foo-81bdb22f")
    assert index.find("foo") == index.find("1_foo") == index.find("1_foo-81bdb22f") == ()


def test_without_random_digits_two_numbered_ids_of_a_client_cannot_be_told_from_samples():
    assert indexed("0_foo", "1_foo", randomised=False).find("foo") == ("0_foo", "1_foo")
    assert indexed("0_foo", randomised=False).find("foo") == ()


def test_a_request_of_a_server_is_found_by_the_id_in_its_header():
    index = indexed("chatcmpl-abc-81bdb22f", "cmpl-abc-0-00000000", "cmpl-abc-1-00000001")
    assert index.find(chat_client_req_id("abc")) == ("chatcmpl-abc-81bdb22f",)
    assert index.find(completion_client_req_id("abc")) == ("cmpl-abc-0-00000000",)
    assert index.find(completion_client_req_id("abc", prompt_index=1)) == ("cmpl-abc-1-00000001",)
