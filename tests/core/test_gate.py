# SPDX-License-Identifier: Apache-2.0
"""The gate: each rule of the table on its own, their order, and a reason that says what to do."""

import dataclasses
import re

import pytest

from omni_core.prefix_cache.gate import GATE_RULES, GateStatus, StageFacts, stage_prefix_cache_config

PLAIN = StageFacts(enabled=True, engine_version="0.32.0", scheduler_block_size=16, block_table_block_size=16)

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
    "context_parallel": (
        {"decode_context_parallel_size": 2, "prefill_context_parallel_size": 4},
        GateStatus.REFUSED,
        r"decode 2, prefill 4",
    ),
    "speculation": ({"num_speculative_tokens": 1}, GateStatus.REFUSED, "num_speculative_tokens=1"),
    "priority_scheduling": ({"scheduling_policy": "priority"}, GateStatus.REFUSED, "'priority'.*use 'fcfs'"),
    "fast_prefill": ({"kv_sharing_fast_prefill": True}, GateStatus.REFUSED, "turn kv_sharing_fast_prefill off"),
    "no_full_attention": ({"attention_group_kinds": ("mamba",)}, GateStatus.REFUSED, "mamba"),
    "hybrid_groups": (
        {"attention_group_kinds": ("full_attention", "sliding_window")},
        GateStatus.REFUSED,
        "full_attention.*sliding_window",
    ),
    "block_size": ({"block_table_block_size": 128}, GateStatus.REFUSED, "block_size=16 .*128"),
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
@pytest.mark.parametrize("loud", ["kv_consumer", "speculation", "priority_scheduling", "hybrid_groups", "block_size"])
def test_a_rank_or_stage_without_use_for_a_cache_is_never_refused_one(quiet, loud):
    decision = stage_prefix_cache_config(dataclasses.replace(PLAIN, **CASES[quiet][0] | CASES[loud][0]))
    assert (decision.status, decision.rule) == (GateStatus.IGNORED, quiet)


@pytest.mark.parametrize("facts", [{}, {"kv_role": "kv_producer"}, {"scheduler_block_size": None}])
def test_what_does_no_harm_is_supported(facts):
    assert stage_prefix_cache_config(dataclasses.replace(PLAIN, **facts)).status is GateStatus.SUPPORTED
