# SPDX-License-Identifier: Apache-2.0
"""The gate: each rule of the table on its own, their order, and a reason that says what to do."""

import dataclasses
import re

import pytest

from omni_core.prefix_cache.gate import (
    GATE_RULES,
    GateStatus,
    StageFacts,
    full_attention_group,
    stage_prefix_cache_config,
)

PLAIN = StageFacts(enabled=True, engine_version="0.32.0", allocator_block_size=16, block_table_block_size=16)

CASES = {
    "not_enabled": ({"enabled": False}, GateStatus.IGNORED, "enabled=true"),
    "version": (
        {"engine_version": "0.99.0", "engine_version_problem": "the runner has no execute_model_state"},
        GateStatus.REFUSED,
        "0.99.0: the runner has no execute_model_state",
    ),
    "pooling": ({"is_pooling": True}, GateStatus.IGNORED, "pooling stage"),
    "prefix_caching_off": ({"prefix_caching": False}, GateStatus.IGNORED, "enable_prefix_caching"),
    "not_output_rank": ({"is_output_rank": False}, GateStatus.IGNORED, "output rank"),
    "kv_consumer": ({"kv_role": "kv_consumer"}, GateStatus.REFUSED, "kv_role='kv_consumer'"),
    "kv_connector": (
        {"kv_role": "kv_producer", "kv_connector": "NixlConnector"},
        GateStatus.REFUSED,
        "kv_connector='NixlConnector' may load.*MooncakeConnector.*turn the cache off",
    ),
    "context_parallel": (
        {"decode_context_parallel_size": 2, "prefill_context_parallel_size": 4},
        GateStatus.REFUSED,
        r"decode 2, prefill 4",
    ),
    "async_speculation": (
        {"num_speculative_tokens": 1, "async_scheduling": True},
        GateStatus.REFUSED,
        "num_speculative_tokens=1 with async_scheduling.*turn async_scheduling off",
    ),
    "priority_scheduling": ({"scheduling_policy": "priority"}, GateStatus.REFUSED, "'priority'.*use 'fcfs'"),
    "fast_prefill": ({"kv_sharing_fast_prefill": True}, GateStatus.REFUSED, "turn kv_sharing_fast_prefill off"),
    "no_full_attention": (
        {"attention_group_kinds": ("mamba", "sliding_window")},
        GateStatus.REFUSED,
        "mamba.*sliding_window.*turn the cache off",
    ),
    "prefix_replay": ({"prefix_replay_tokens": 1024}, GateStatus.REFUSED, "prefix_replay_tokens=1024"),
    "block_size": ({"block_table_block_size": 12}, GateStatus.REFUSED, "blocks of 16 tokens.*12; pass a block_size"),
}


def test_a_plain_stage_is_supported():
    decision = stage_prefix_cache_config(PLAIN)
    assert (decision.status, decision.rule) == (GateStatus.SUPPORTED, "supported")


@pytest.mark.parametrize("rule", CASES)
def test_each_rule_alone_decides_with_its_reason(rule):
    facts, status, reason = CASES[rule]
    decision = stage_prefix_cache_config(dataclasses.replace(PLAIN, **facts))
    assert (decision.status, decision.rule) == (status, rule)
    assert re.search(reason, decision.reason)


def test_every_rule_of_the_table_has_a_case_here():
    assert [rule.name for rule in GATE_RULES] == list(CASES)


@pytest.mark.parametrize("rule", list(CASES)[1:])
def test_a_stage_that_did_not_ask_is_never_refused(rule):
    facts, _, _ = CASES[rule]
    decision = stage_prefix_cache_config(dataclasses.replace(PLAIN, **facts | {"enabled": False}))
    assert (decision.status, decision.rule) == (GateStatus.IGNORED, "not_enabled")


@pytest.mark.parametrize("quiet", ["pooling", "not_output_rank", "prefix_caching_off"])
@pytest.mark.parametrize(
    "loud", ["kv_consumer", "async_speculation", "priority_scheduling", "no_full_attention", "block_size"]
)
def test_a_rank_or_stage_without_use_for_a_cache_is_never_refused_one(quiet, loud):
    decision = stage_prefix_cache_config(dataclasses.replace(PLAIN, **CASES[quiet][0] | CASES[loud][0]))
    assert (decision.status, decision.rule) == (GateStatus.IGNORED, quiet)


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
    ],
)
def test_what_does_no_harm_is_supported(facts):
    assert stage_prefix_cache_config(dataclasses.replace(PLAIN, **facts)).status is GateStatus.SUPPORTED


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
