# SPDX-License-Identifier: Apache-2.0
"""What the gate is told about a stage, and what it answers, without an engine."""

from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch

from omni_core.integrations.vllm.errors import GateRefusedError
from omni_core.integrations.vllm.stage_facts import KvGroups, cache_config, decide, stage_facts
from omni_core.prefix_cache.block_pool import RowSpec
from omni_core.prefix_cache.config import PrefixCacheConfig
from omni_core.prefix_cache.gate import GateStatus
from omni_core.settings.stage_settings import StageSettings

ON = StageSettings(enabled=True)
CONSUMER, BOTH, PRODUCER = (
    SimpleNamespace(kv_role=role, kv_connector="MooncakeConnector")
    for role in ("kv_consumer", "kv_both", "kv_producer")
)
DRAFTS = SimpleNamespace(num_speculative_tokens=3)
LET_TRY = StageSettings(enabled=True, allow_untested_version=True)


def vllm_config(**changed):
    """A stage that the gate lets through, with `changed` parts."""
    parts = {
        "cache_config": SimpleNamespace(enable_prefix_caching=True, block_size=32, kv_sharing_fast_prefill=False),
        "parallel_config": SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1, data_parallel_size_local=1
        ),
        "scheduler_config": SimpleNamespace(policy="fcfs", max_num_batched_tokens=256, async_scheduling=False),
        "compilation_config": SimpleNamespace(cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: False)),
        "device_config": SimpleNamespace(device_type="cpu"),
        "kv_transfer_config": None,
        "speculative_config": None,
        "model_config": SimpleNamespace(runner_type="generate", dtype=torch.bfloat16, get_hidden_size=lambda: 64),
    }
    return SimpleNamespace(**(parts | changed))


FULL_GRAPHS = vllm_config(
    compilation_config=SimpleNamespace(cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: True))
)
PLAIN_GROUPS = {"kinds": ("full_attention",), "allocator_block_size": 32, "block_table_block_size": 32}


def facts(config=None, settings=ON, *, groups=None, **changed):
    known = {
        "is_output_rank": True,
        "kv_groups": KvGroups(**(PLAIN_GROUPS | (groups or {}))),
        "engine_version": "0.32.0",
    }
    return stage_facts(settings, config or vllm_config(), **(known | changed))


def test_a_plain_stage_gets_a_cache():
    assert decide(facts()).status is GateStatus.SUPPORTED


@pytest.mark.parametrize(
    ("changed", "rule"),
    [
        ({"settings": StageSettings(enabled=False)}, "not_enabled"),
        ({"config": vllm_config(model_config=SimpleNamespace(runner_type="pooling"))}, "pooling"),
        ({"is_output_rank": False}, "not_output_rank"),
        (
            {
                "config": vllm_config(
                    cache_config=SimpleNamespace(
                        enable_prefix_caching=False, block_size=32, kv_sharing_fast_prefill=False
                    )
                )
            },
            "prefix_caching_off",
        ),
    ],
)
def test_a_stage_with_no_use_for_a_cache_is_left_alone(changed, rule):
    decision = decide(facts(**changed))
    assert (decision.status, decision.rule) == (GateStatus.IGNORED, rule)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (
            {
                "config": vllm_config(
                    speculative_config=DRAFTS, scheduler_config=SimpleNamespace(policy="fcfs", async_scheduling=True)
                )
            },
            "num_speculative_tokens=3",
        ),
        (
            {"config": vllm_config(kv_transfer_config=CONSUMER)},
            "kv_role='kv_consumer'",
        ),
        (
            {"config": vllm_config(kv_transfer_config=BOTH)},
            "kv_role='kv_both'",
        ),
        (
            {"config": vllm_config(scheduler_config=SimpleNamespace(policy="priority", async_scheduling=False))},
            "scheduling_policy='priority'",
        ),
        (
            {
                "config": vllm_config(
                    parallel_config=SimpleNamespace(decode_context_parallel_size=2, prefill_context_parallel_size=1)
                )
            },
            "decode 2",
        ),
        ({"groups": {"kinds": ("sliding_window",)}}, "sliding_window"),
        ({"groups": {"prefix_replay_tokens": 128}}, "prefix_replay_tokens=128"),
        ({"groups": {"block_table_block_size": 24}}, "blocks of 32 tokens"),
        ({"engine_version": "0.26.1"}, "0.26.1"),
        ({"engine_version": "0.31.0", "uses_v2_runner": True}, "VLLM_USE_V2_MODEL_RUNNER=0"),
        ({"uses_v2_runner": True, "groups": {"block_table_block_size": 16}}, "blocks of 32 tokens"),
        ({"config": vllm_config(device_config=SimpleNamespace(device_type="xpu"))}, "device type 'xpu'"),
        ({"config": vllm_config(device_config=SimpleNamespace(device_type="npu"))}, "allow_untested_version"),
        (
            {
                "config": vllm_config(device_config=SimpleNamespace(device_type="npu")),
                "settings": LET_TRY,
                "uses_v2_runner": True,
            },
            "VLLM_USE_V2_MODEL_RUNNER=0",
        ),
        (
            {
                "config": vllm_config(
                    speculative_config=SimpleNamespace(num_speculative_tokens=3, enable_adaptive_verification=True)
                )
            },
            "enable_adaptive_verification",
        ),
        (
            {"config": vllm_config(model_config=SimpleNamespace(runner_type="generate", is_diffusion=True))},
            "decodes by diffusion",
        ),
        ({"config": FULL_GRAPHS, "hands_out_outputs": True}, '"cudagraph_mode": "PIECEWISE"'),
    ],
)
def test_a_stage_whose_rows_could_be_wrong_is_refused_with_the_reason(changed, named):
    with pytest.raises(GateRefusedError) as refusal:
        decide(facts(**changed))
    assert named in str(refusal.value)


@pytest.mark.parametrize(
    "changed",
    [
        {"config": vllm_config(speculative_config=DRAFTS)},
        {"groups": {"kinds": ("mamba", "full_attention")}},
        {"groups": {"block_table_block_size": 16}},
        {"uses_v2_runner": True},
        {"config": FULL_GRAPHS},
        {"config": vllm_config(device_config=SimpleNamespace(device_type="cuda"))},
        {"config": vllm_config(device_config=SimpleNamespace(device_type="npu")), "settings": LET_TRY},
        {"config": vllm_config(scheduler_config=SimpleNamespace(policy="fcfs", async_scheduling=True))},
    ],
)
def test_drafts_hybrid_models_smaller_kernel_blocks_and_other_devices_are_served(changed):
    assert decide(facts(**changed)).status is GateStatus.SUPPORTED


@pytest.mark.parametrize("changed", [{}, {"uses_v2_runner": True}])
def test_what_the_configuration_alone_says_is_refused_before_the_kv_cache_is_made(changed):
    consumer = vllm_config(kv_transfer_config=CONSUMER)
    with pytest.raises(GateRefusedError):
        decide(stage_facts(ON, consumer, engine_version="0.32.0", **changed))
    assert decide(stage_facts(ON, vllm_config(), engine_version="0.32.0")).status is GateStatus.SUPPORTED


def test_a_producer_whose_connector_may_load_is_refused():
    transfer = SimpleNamespace(kv_role="kv_producer", kv_connector="OffloadingConnector")
    with pytest.raises(GateRefusedError, match="OffloadingConnector"):
        decide(facts(vllm_config(kv_transfer_config=transfer)))


def test_a_producer_is_served():
    config = vllm_config(kv_transfer_config=PRODUCER)
    assert decide(facts(config)).status is GateStatus.SUPPORTED


def test_the_caches_configuration_is_the_stages():
    config = cache_config(StageSettings(enabled=True), vllm_config(), num_blocks=100, block_size=32)
    assert (config.num_blocks, config.block_size, config.hidden_size) == (100, 32, 64)
    assert (config.hidden_dtype, config.max_num_tokens) == (torch.bfloat16, 256)


def test_every_setting_that_the_cache_has_too_reaches_it():
    shared = {field.name for field in fields(StageSettings)} & {field.name for field in fields(PrefixCacheConfig)}
    assert shared == {
        "staging_depth",
        "staging_claim_timeout_s",
        "join_timeout_s",
        "extra_row_bytes",
        "extra_step_bytes",
        "device_staging_bytes",
        "max_recycled_bytes",
        "pretouch",
        "pin_chunk_bytes",
    }
    default = StageSettings(enabled=True)
    for name in shared:
        before = getattr(default, name)
        value = not before if isinstance(before, bool) else before + (1 << 20)
        config = cache_config(replace(default, **{name: value}), vllm_config(), num_blocks=100, block_size=32)
        assert getattr(config, name) == value


def test_rows_of_chosen_layers_are_known_beforehand():
    config = cache_config(StageSettings(enabled=True, layers=(0, 3)), vllm_config(), num_blocks=100, block_size=32)
    row = RowSpec((64,), torch.bfloat16)
    assert config.key_rows == {"hidden_states.layer_0": row, "hidden_states.layer_3": row}
