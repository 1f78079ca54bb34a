# SPDX-License-Identifier: Apache-2.0
"""The gate: each rule of the table on its own, their order, and a reason that says what to do."""

import dataclasses
import re

import pytest

from omni_core.prefix_cache.gate import (
    GATE_RULES,
    GateStatus,
    full_attention_group,
    stage_prefix_cache_config,
)
from omni_core.prefix_cache.gate_facts import StageFacts, StageKind
from omni_core.prefix_cache.gate_platforms import PLATFORM_RUNNERS, ModelRunner, runner_problem

PLAIN = StageFacts(enabled=True, engine_version="0.32.0", allocator_block_size=16, block_table_block_size=16)

CASES = {
    "not_enabled": ({"enabled": False}, GateStatus.IGNORED, "the cache is off", "set enabled=true"),
    "version": (
        {
            "engine_version": "0.99.0",
            "engine_version_problem": "the runner has no execute_model_state",
            "engine_version_remedy": "install 0.32.0",
        },
        GateStatus.REFUSED,
        "0.99.0: the runner has no execute_model_state",
        "install 0.32.0",
    ),
    "runner": (
        {"device_type": "npu", "model_runner": ModelRunner.V2},
        GateStatus.REFUSED,
        "npu, V2: .*unfinished",
        "set VLLM_USE_V2_MODEL_RUNNER=0",
    ),
    "pooling": ({"kind": StageKind.POOLING}, GateStatus.IGNORED, "pooling stage", ""),
    "codec_decoder": (
        {"kind": StageKind.CODEC_DECODER},
        GateStatus.ADVISED_OFF,
        "a waveform and no row per token",
        "leave the cache .* off .* if it does .* stage_kind='autoregressive'",
    ),
    "diffusion": ({"kind": StageKind.DIFFUSION}, GateStatus.IGNORED, "omni_core.diffusion_kv, which", ""),
    "prefix_caching_off": (
        {"prefix_caching": False},
        GateStatus.IGNORED,
        "enable_prefix_caching is off",
        "set enable_prefix_caching=True",
    ),
    "not_output_rank": ({"is_output_rank": False}, GateStatus.IGNORED, "output rank", ""),
    "kv_consumer": ({"kv_role": "kv_consumer"}, GateStatus.REFUSED, "kv_role='kv_consumer'", "turn the cache off"),
    "kv_connector": (
        {"kv_role": "kv_producer", "kv_connector": "NixlConnector"},
        GateStatus.REFUSED,
        "kv_connector='NixlConnector' may load",
        "MooncakeConnector.*turn the cache off",
    ),
    "context_parallel": (
        {"decode_context_parallel_size": 2, "prefill_context_parallel_size": 4},
        GateStatus.REFUSED,
        "decode 2, prefill 4",
        "set both sizes to 1",
    ),
    "async_speculation": (
        {"num_speculative_tokens": 1, "async_scheduling": True},
        GateStatus.REFUSED,
        "num_speculative_tokens=1 with async_scheduling",
        "turn async_scheduling off",
    ),
    "adaptive_verification": (
        {"num_speculative_tokens": 3, "adaptive_verification": True},
        GateStatus.REFUSED,
        "chooses on the device which drafts",
        "set enable_adaptive_verification=false",
    ),
    "diffusion_decoding": (
        {"decodes_by_diffusion": True},
        GateStatus.REFUSED,
        "decodes by diffusion",
        "turn the cache off",
    ),
    "full_graphs": (
        {"hands_out_outputs": True, "full_graphs": True},
        GateStatus.REFUSED,
        "replayed as one graph runs none of its Python",
        '"cudagraph_mode": "PIECEWISE"',
    ),
    "priority_scheduling": ({"scheduling_policy": "priority"}, GateStatus.REFUSED, "'priority'", "use 'fcfs'"),
    "fast_prefill": (
        {"kv_sharing_fast_prefill": True},
        GateStatus.REFUSED,
        "last layers skip prompt tokens",
        "turn kv_sharing_fast_prefill off",
    ),
    "no_full_attention": (
        {"attention_group_kinds": ("mamba", "sliding_window")},
        GateStatus.REFUSED,
        "mamba.*sliding_window",
        "turn the cache off",
    ),
    "prefix_replay": ({"prefix_replay_tokens": 1024}, GateStatus.REFUSED, "_tokens=1024", "turn the cache off"),
    "block_size": (
        {"block_table_block_size": 12},
        GateStatus.REFUSED,
        "blocks of 16 tokens.*12",
        "pass a block_size",
    ),
    "no_hidden_rows": (
        {"keeps_hidden_rows": False, "num_deferred_keys": 2},
        GateStatus.SUPPORTED,
        "keeps no hidden rows.*2 of those declared deferred",
        "",
    ),
    "kv_producer": (
        {"kv_role": "kv_producer", "kv_connector": "MooncakeConnector"},
        GateStatus.SUPPORTED,
        "kv_connector='MooncakeConnector'",
        "",
    ),
    "hidden_rows": ({}, GateStatus.SUPPORTED, "an autoregressive stage; KV group 0 of", ""),
}
NAMED_IN_THE_ISSUE = [
    ({}, GateStatus.SUPPORTED),
    ({"keeps_hidden_rows": False}, GateStatus.SUPPORTED),
    ({"keeps_hidden_rows": False, "num_deferred_keys": 1}, GateStatus.SUPPORTED),
    ({"kv_role": "kv_producer", "kv_connector": "MooncakeConnector"}, GateStatus.SUPPORTED),
    ({"kind": StageKind.POOLING}, GateStatus.IGNORED),
    ({"prefix_caching": False}, GateStatus.IGNORED),
    ({"is_output_rank": False}, GateStatus.IGNORED),
    ({"kind": StageKind.CODEC_DECODER}, GateStatus.ADVISED_OFF),
    ({"kind": StageKind.DIFFUSION}, GateStatus.IGNORED),
    ({"kv_role": "kv_consumer"}, GateStatus.REFUSED),
    ({"kv_role": "kv_both"}, GateStatus.REFUSED),
    ({"decode_context_parallel_size": 2}, GateStatus.REFUSED),
    ({"num_speculative_tokens": 3, "async_scheduling": True}, GateStatus.REFUSED),
    ({"attention_group_kinds": ("sliding_window",)}, GateStatus.REFUSED),
    ({"engine_version_problem": "never run"}, GateStatus.REFUSED),
]


def decided(**facts):
    return stage_prefix_cache_config(dataclasses.replace(PLAIN, **facts))


@pytest.mark.parametrize(("facts", "status"), NAMED_IN_THE_ISSUE)
def test_every_case_an_operator_may_ask_about_has_its_answer(facts, status):
    assert decided(**facts).status is status


@pytest.mark.parametrize("rule", CASES)
def test_each_rule_alone_decides_with_its_reason_and_says_what_to_change(rule):
    facts, status, reason, remedy = CASES[rule]
    decision = decided(**facts)
    assert (decision.status, decision.rule) == (status, rule)
    assert re.search(reason, decision.reason)
    assert re.search(remedy, decision.remedy)
    assert bool(remedy) == bool(decision.remedy)
    assert decision.explanation == "; ".join(filter(None, (decision.reason, decision.remedy)))


def test_every_rule_of_the_table_has_a_case_here():
    assert [rule.name for rule in GATE_RULES] == list(CASES)


def test_what_is_refused_or_advised_against_says_what_to_change_and_what_is_supported_has_nothing_to():
    for rule in GATE_RULES:
        if rule.status in (GateStatus.REFUSED, GateStatus.ADVISED_OFF):
            assert rule.remedy, rule.name
        if rule.status is GateStatus.SUPPORTED:
            assert not rule.remedy, rule.name


def test_no_rule_stands_behind_the_one_that_always_applies():
    always = [rule for rule in GATE_RULES if rule.applies(PLAIN)]
    assert always == [GATE_RULES[-1]]


@pytest.mark.parametrize("rule", list(CASES)[1:])
def test_a_stage_that_did_not_ask_is_never_refused(rule):
    decision = decided(**CASES[rule][0] | {"enabled": False})
    assert (decision.status, decision.rule) == (GateStatus.IGNORED, "not_enabled")


@pytest.mark.parametrize("quiet", ["pooling", "codec_decoder", "diffusion", "not_output_rank", "prefix_caching_off"])
@pytest.mark.parametrize(
    "loud", ["kv_consumer", "async_speculation", "priority_scheduling", "no_full_attention", "block_size"]
)
def test_a_rank_or_stage_without_use_for_a_cache_is_never_refused_one(quiet, loud):
    decision = decided(**CASES[quiet][0] | CASES[loud][0])
    assert (decision.status, decision.rule) == (CASES[quiet][1], quiet)


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"kv_role": "kv_producer", "kv_connector": "MooncakeConnector"},
        {"kv_role": "kv_producer", "kv_connector": "ExampleHiddenStatesConnector"},
        {"allocator_block_size": None},
        {"num_speculative_tokens": 3},
        {"async_scheduling": True},
        {"attention_group_kinds": ("sliding_window", "mamba", "full_attention")},
        {"attention_group_kinds": ("mla_attention",)},
        {"block_table_block_size": 4},
        {"hands_out_outputs": True},
        {"full_graphs": True},
        {"model_runner": ModelRunner.V2},
        {"device_type": "cuda"},
        {"device_type": "cuda", "model_runner": ModelRunner.V2, "async_scheduling": True},
        {"device_type": "npu", "async_scheduling": True},
    ],
)
def test_what_does_no_harm_is_supported(facts):
    assert decided(**facts).status is GateStatus.SUPPORTED


@pytest.mark.parametrize(
    ("kinds", "index"),
    [
        (("full_attention",), 0),
        (("sliding_window", "sliding_window", "full_attention"), 2),
        (("mamba", "mla_attention", "full_attention"), 1),
        (("sliding_window",), None),
        (("sink_full_attention", "chunked_local_attention", "unknown"), None),
        ((), None),
    ],
)
def test_the_group_to_mirror_is_the_first_that_keeps_every_tokens_block(kinds, index):
    assert full_attention_group(kinds) == index


def test_the_second_runner_writes_down_the_schedulers_blocks_so_smaller_ones_are_refused():
    decision = decided(model_runner=ModelRunner.V2, block_table_block_size=4)
    assert (decision.status, decision.rule) == (GateStatus.REFUSED, "block_size")


def test_each_runner_on_each_device_is_listed_once_and_what_is_refused_says_why_and_what_to_do():
    assert len({(one.device_type, one.runner) for one in PLATFORM_RUNNERS}) == len(PLATFORM_RUNNERS) == 6
    for one in PLATFORM_RUNNERS:
        assert bool(one.refusal) == bool(one.remedy) == (runner_problem(one.device_type, one.runner) is not None)
        assert one.checked


def test_a_device_without_a_worker_class_is_refused_and_those_with_one_are_named():
    assert "there are worker classes for cpu, cuda, npu only" in decided(device_type="xpu").reason
