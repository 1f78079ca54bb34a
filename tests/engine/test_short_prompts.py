# SPDX-License-Identifier: Apache-2.0
"""A real vLLM whose prompts are shorter than the effective block: one warning, with the block the scheduler goes by."""

from pathlib import Path

import pytest
from engine_program import run_engine_program

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

HERE = Path(__file__).parent


@pytest.fixture
def run(tmp_path):
    def run_scenario(name):
        return run_engine_program(
            HERE / "short_prompts.py", name, tmp_path / f"{name}.json", modules=[HERE, HERE / "features"]
        )

    return run_scenario


def test_the_first_prompt_that_cannot_hit_is_warned_of_and_no_other(run):
    seen = run("short_then_long")
    assert seen["at_start"] == []
    [message] = seen["later"]
    assert "has 20 tokens" in message
    assert seen["scheduler_block_size"] == 64
    assert "here 64 tokens" in message
    assert "full_attention (64 tokens per block)" in message
    assert seen["rows_from_hits"] == 64 + 192  # the two long prompts did hit


def test_a_model_length_that_rules_hits_out_is_warned_of_at_start_and_not_again(run):
    seen = run("longest_too_short")
    [message] = seen["at_start"]
    assert "max_model_len=64 is below the 65 tokens of the shortest prompt that can" in message
    assert seen["later"] == []
    assert seen["rows_from_hits"] == 0


def test_a_hybrid_models_block_is_the_schedulers_and_the_groups_behind_it_are_named(run):
    seen = run("hybrid")
    assert seen["at_start"] == []
    [message] = seen["later"]
    assert "has 200 tokens" in message
    assert seen["scheduler_block_size"] > 200
    assert f"here {seen['scheduler_block_size']} tokens" in message
    assert "mamba (" in message
    assert seen["rows_from_hits"] == 0


def test_the_advice_for_a_hybrid_model_helps(run):
    seen = run("hybrid_with_a_finer_unit")
    assert seen["at_start"] == seen["later"] == []
    assert seen["rows_from_hits"] == 192
