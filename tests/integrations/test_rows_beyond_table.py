# SPDX-License-Identifier: Apache-2.0
"""A row beyond its request's blocks has no slot: vLLM's table holds zeros there, which would pass for one."""

import pytest
from fake_runner import BLOCK_SIZE, FakeRunner, scheduled

from omni_core.integrations.vllm.errors import RowsBeyondTableError
from omni_core.integrations.vllm.runners.v1 import V1View


def runner_after(*steps):
    runner = FakeRunner()
    for step in steps:
        runner.execute_model(step)
        runner.sample_tokens({})
    return runner


def test_rows_up_to_the_end_of_the_last_block_have_slots():
    step = scheduled(new=[("a", list(range(2 * BLOCK_SIZE)), [3, 5], 0, 2 * BLOCK_SIZE)])
    arrays = V1View(0).arrays(runner_after(step), step)
    assert arrays.slots.tolist() == [*range(3 * BLOCK_SIZE, 4 * BLOCK_SIZE), *range(5 * BLOCK_SIZE, 6 * BLOCK_SIZE)]


def test_a_row_beyond_the_blocks_is_an_error_that_names_request_position_and_blocks():
    started = scheduled(
        new=[("a", list(range(BLOCK_SIZE)), [3], 0, BLOCK_SIZE), ("b", list(range(BLOCK_SIZE)), [4], 0, BLOCK_SIZE)]
    )
    beyond = scheduled(running=[("a", BLOCK_SIZE, 1, [7]), ("b", BLOCK_SIZE, 1, None)])
    runner = runner_after(started, beyond)
    with pytest.raises(RowsBeyondTableError, match=rf"'b' has a row at position {BLOCK_SIZE}, but its 1 KV blocks"):
        V1View(0).arrays(runner, beyond)


def test_a_row_beyond_what_a_table_can_hold_is_the_same_error():
    full = [*range(1, 17)]
    started = scheduled(new=[("a", list(range(64)), full, 0, 64)])
    beyond = scheduled(running=[("a", 64, 1, None)])
    runner = runner_after(started)
    runner.input_batch.num_computed_tokens_cpu[0] = 64
    with pytest.raises(RowsBeyondTableError, match="'a' has a row at position 64, but its 16 KV blocks"):
        V1View(0).arrays(runner, beyond)
