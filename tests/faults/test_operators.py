# SPDX-License-Identifier: Apache-2.0
"""The rows of faults.md that an operator would otherwise find out late, on a fake runner with the real hooks."""

import logging

import fake_runner as fake
import pytest
from fake_stage import FakeStage

from omni_core.integrations.vllm.effective_block import BlockOfGroup, EffectiveBlock

BOUND_S = 20.0
HYBRID = EffectiveBlock(4096, (BlockOfGroup("full_attention", 16), BlockOfGroup("mamba", 4096)))


@pytest.fixture
def stage():
    made = FakeStage(first_prompts_block=HYBRID)
    yield made
    made.session.close(BOUND_S)


def test_fault_109_a_cache_that_never_hits_says_so_once_with_the_effective_block(stage, caplog):
    """A prompt of 8 tokens on a hybrid layout whose blocks end together every 4,096 tokens only."""
    prompt = [11, 12, 13, 14, 15, 16, 17, 18]
    with caplog.at_level(logging.WARNING, logger="omni_core"):
        stage.step(fake.scheduled(new=[("a-00000001", prompt, [1, 2], 0, 8)]))
        stage.step(fake.scheduled(new=[("b-00000002", prompt, [3, 4], 0, 8)], finished=["a-00000001"]))
    [record] = caplog.records
    message = record.getMessage()
    for told in ("'a-00000001', has 8 tokens", "here 4096 tokens", "mamba (4096 tokens per block)", "enabled=false"):
        assert told in message
    stage.session.flush(BOUND_S, still_running=())
    assert stage.session.report()["cache"]["rows_from_hits"] == 0
    assert stage.stored("b-00000002").hidden_states.tolist() == [fake.row_of(prompt, at) for at in range(8)]
