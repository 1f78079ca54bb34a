# SPDX-License-Identifier: Apache-2.0
"""The client's id behind the id a worker sees."""

import pytest

from omni_core.integrations.vllm.request_ids import ClientRequest, client_request


@pytest.mark.parametrize(
    ("req_id", "client", "sample"),
    [
        ("a-81bdb22f", "a", None),
        ("0-a2e2073e", "0", None),
        ("chatcmpl-9f2-81bdb22f", "chatcmpl-9f2", None),
        ("with spaces/and\nlines-00000000", "with spaces/and\nlines", None),
        ("a-81bdb22f-12345678", "a-81bdb22f", None),
        ("0_0-81bdb22f", "0", 0),
        ("13_my request-81bdb22f", "my request", 13),
        ("_a-81bdb22f", "_a", None),
    ],
)
def test_the_random_suffix_and_the_sample_index_come_off(req_id, client, sample):
    assert client_request(req_id) == ClientRequest(client, sample)


@pytest.mark.parametrize("req_id", ["", "a", "a-81bdb22", "a-81BDB22F", "a_81bdb22f", "-81bdb22f", "a-81bdb22f "])
def test_an_id_of_another_form_has_no_known_client(req_id):
    assert client_request(req_id) is None


def test_an_engine_that_does_not_randomise_keeps_the_clients_id():
    assert client_request("a-81bdb22f", randomised=False) == ClientRequest("a-81bdb22f", None)
    assert client_request("1_a", randomised=False) == ClientRequest("a", 1)
