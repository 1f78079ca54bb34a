# SPDX-License-Identifier: Apache-2.0
"""What the engines of `omni-core bench vllm` are sent."""

import json
from dataclasses import replace

import pytest

from omni_core.integrations.vllm.bench.loads import Load, LoadKind

VOCAB_SIZE = 4000


def a_load(kind=LoadKind.REUSE, number=0, concurrency=8):
    return Load(kind, number, concurrency, num_requests=5, prefix_tokens=64, own_tokens=16, output_tokens=4)


@pytest.mark.parametrize("kind", LoadKind)
def test_a_load_goes_through_json_and_means_the_same_prompts(kind):
    load = a_load(kind)
    again = Load.from_document(json.loads(json.dumps(load.as_document())))
    assert again == load
    assert again.prompts(VOCAB_SIZE) == load.prompts(VOCAB_SIZE)


def test_prompts_of_a_reuse_share_their_prefix_and_nothing_else():
    prompts = a_load().prompts(VOCAB_SIZE)
    assert [len(prompt) for prompt in prompts] == [80] * 5
    assert len({tuple(prompt[:64]) for prompt in prompts}) == 1
    assert len({tuple(prompt[64:]) for prompt in prompts}) == 5


def test_prompts_without_reuse_share_nothing():
    prompts = a_load(LoadKind.NO_REUSE).prompts(VOCAB_SIZE)
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 5


def test_no_two_loads_have_a_prompt_in_common():
    loads = [a_load(kind, number, concurrency) for kind in LoadKind for number in range(3) for concurrency in (1, 8)]
    beginnings = {tuple(load.prompts(VOCAB_SIZE)[0][:16]) for load in loads}
    assert len(beginnings) == len(loads)


@pytest.mark.parametrize("kind", LoadKind)
def test_the_parts_of_a_load_have_its_prompts(kind):
    load = a_load(kind, concurrency=1)
    parts = [replace(load, first_request=number, num_requests=1) for number in range(load.num_requests)]
    assert [prompt for part in parts for prompt in part.prompts(VOCAB_SIZE)] == load.prompts(VOCAB_SIZE)
    assert sum(part.num_rows for part in parts) == load.num_rows


def test_token_ids_are_of_the_vocabulary():
    for prompt in a_load().prompts(32):
        assert min(prompt) >= 4
        assert max(prompt) < 32


def test_rows_of_a_load_leave_out_each_last_token():
    assert a_load().num_rows == 5 * (64 + 16 + 4 - 1)
