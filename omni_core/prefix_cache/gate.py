# SPDX-License-Identifier: Apache-2.0
"""The one place that says whether a stage gets a cache. Called by every worker class at KV-cache init.

`GATE_RULES` is data: `docs/support.md` is rendered from it by `scripts/render_gate.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from omni_core.prefix_cache.gate_answers import GateDecision, GateRule, GateStatus
from omni_core.prefix_cache.gate_facts import StageFacts, StageKind
from omni_core.prefix_cache.gate_platforms import ModelRunner, RunnerProblem, runner_problem

__all__ = [
    "GATE_RULES",
    "GateDecision",
    "GateRule",
    "GateStatus",
    "StageFacts",
    "full_attention_group",
    "stage_prefix_cache_config",
]

FULL_ATTENTION_KINDS = frozenset({"full_attention", "mla_attention"})
"""Kinds of KV-cache groups whose block table names the blocks of all tokens (vLLM: `FullAttentionManager`)."""

STORE_ONLY_CONNECTORS = frozenset({"ExampleHiddenStatesConnector", "MooncakeConnector"})
"""KV connectors of vLLM 0.32 that never load in the role `kv_producer`, by `get_num_new_matched_tokens` of each."""


def full_attention_group(attention_group_kinds: Sequence[str]) -> int | None:
    """Index of the KV-cache group a cache mirrors: the first in which a hit names all of a request's blocks. Pure.

    Groups of other kinds name the null block for tokens outside their window, or keep one state per block.
    """
    return next((index for index, kind in enumerate(attention_group_kinds) if kind in FULL_ATTENTION_KINDS), None)


def _block_sizes_do_not_fit(facts: StageFacts) -> bool:
    allocator, table = facts.allocator_block_size, facts.block_table_block_size
    if allocator is None or table is None:
        return False
    # The first runner names its own blocks; the second writes down the scheduler's as they are.
    return allocator % table != 0 if facts.model_runner is ModelRunner.V1 else allocator != table


def _runner_problem(facts: StageFacts) -> RunnerProblem:
    return runner_problem(facts.device_type, facts.model_runner) or RunnerProblem("", "")


GATE_RULES: tuple[GateRule, ...] = (
    GateRule(
        "not_enabled",
        GateStatus.IGNORED,
        "the stage did not ask for a cache",
        lambda f: not f.enabled,
        lambda f: "the cache is off",
        "set enabled=true in additional_config's omni_core section to turn it on",
    ),
    GateRule(
        "version",
        GateStatus.REFUSED,
        "vLLM is none of the releases Omni Core was run on, or lacks something it rests on; any vLLM-Ascend, and model "
        "runner V2 of a release it was not run on",
        lambda f: f.engine_version_problem is not None,
        lambda f: f"unsupported engine version {f.engine_version}: {f.engine_version_problem}",
        "install one of those releases, unchanged; set allow_untested_version=true if nothing is lacking; set "
        "VLLM_USE_V2_MODEL_RUNNER=0 for the first runner; or turn the cache off",
        remedy_here=lambda f: f.engine_version_remedy,
    ),
    GateRule(
        "runner",
        GateStatus.REFUSED,
        "a device without a worker class, or a model runner that cannot be served on it: the table below",
        lambda f: runner_problem(f.device_type, f.model_runner) is not None,
        lambda f: _runner_problem(f).reason,
        "set VLLM_USE_V2_MODEL_RUNNER=0 where the first runner can be served; else turn the cache off",
        remedy_here=lambda f: _runner_problem(f).remedy,
    ),
    GateRule(
        "pooling",
        GateStatus.IGNORED,
        "a pooling stage: it hands on no row per token",
        lambda f: f.kind is StageKind.POOLING,
        lambda f: "a pooling stage hands on no rows per token",
    ),
    GateRule(
        "codec_decoder",
        GateStatus.ADVISED_OFF,
        "a codec decoder (vocoder, code-to-wave): it decodes whole sequences, and hands on no row per token",
        lambda f: f.kind is StageKind.CODEC_DECODER,
        lambda f: (
            "a codec decoder hands on a waveform and no row per token, and needs every code of its sequence: a hit "
            "would save it nothing"
        ),
        "leave the cache and enable_prefix_caching off on this stage; if it does hand on rows per token, declare "
        "stage_kind='autoregressive' in the model's omni_cache_policy",
    ),
    GateRule(
        "diffusion",
        GateStatus.IGNORED,
        "a diffusion stage: it returns no rows; its KV pages are the matter of `omni_core.diffusion_kv`",
        lambda f: f.kind is StageKind.DIFFUSION,
        lambda f: (
            "a diffusion stage computes every row anew in each denoising step; reuse of its KV pages is the matter of "
            "omni_core.diffusion_kv, which this version does not have"
        ),
    ),
    GateRule(
        "prefix_caching_off",
        GateStatus.IGNORED,
        "`enable_prefix_caching` is off: no token is skipped, so every row comes out anyway",
        lambda f: not f.prefix_caching,
        lambda f: "enable_prefix_caching is off: the engine skips no tokens, so every row comes out anyway",
        "set enable_prefix_caching=True if the engine is to skip what it has computed before",
    ),
    GateRule(
        "not_output_rank",
        GateStatus.IGNORED,
        "the engine does not use this rank's outputs: the output rank has the cache",
        lambda f: not f.is_output_rank,
        lambda f: "this rank's outputs are not used by the engine; the output rank holds the cache",
    ),
    GateRule(
        "kv_consumer",
        GateStatus.REFUSED,
        "`kv_role` is `kv_consumer` or `kv_both`: received KV counts as computed, its rows never were",
        lambda f: f.kv_role in ("kv_consumer", "kv_both"),
        lambda f: (
            f"kv_role={f.kv_role!r}: KV received from a producer counts as computed, but its rows were never "
            "computed here"
        ),
        "turn the cache off on this stage",
    ),
    GateRule(
        "kv_connector",
        GateStatus.REFUSED,
        "a KV connector that may load in the role `kv_producer` too",
        lambda f: f.kv_connector is not None and f.kv_connector not in STORE_ONLY_CONNECTORS,
        lambda f: (
            f"kv_connector={f.kv_connector!r} may load KV as a producer too; what it loads counts as computed, but its "
            "rows were never computed here"
        ),
        f"use one that only stores ({', '.join(sorted(STORE_ONLY_CONNECTORS))}), or turn the cache off on this stage",
    ),
    GateRule(
        "context_parallel",
        GateStatus.REFUSED,
        "decode or prefill context parallelism: tokens are striped over ranks",
        lambda f: f.decode_context_parallel_size > 1 or f.prefill_context_parallel_size > 1,
        lambda f: (
            f"context parallelism (decode {f.decode_context_parallel_size}, prefill "
            f"{f.prefill_context_parallel_size}) stripes tokens over ranks"
        ),
        "set both sizes to 1",
    ),
    GateRule(
        "async_speculation",
        GateStatus.REFUSED,
        "speculative decoding with asynchronous scheduling: the worker learns too late which drafts were accepted",
        lambda f: f.async_scheduling and f.num_speculative_tokens > 0,
        lambda f: (
            f"num_speculative_tokens={f.num_speculative_tokens} with async_scheduling: the worker learns too late "
            "which drafts were accepted"
        ),
        "turn async_scheduling off or remove speculative_config",
    ),
    GateRule(
        "adaptive_verification",
        GateStatus.REFUSED,
        "adaptive verification of drafts: the runner chooses on the device which rows a step has",
        lambda f: f.adaptive_verification,
        lambda f: (
            "enable_adaptive_verification: the model runner chooses on the device which drafts to verify, so the host "
            "does not know which rows a step has"
        ),
        "set enable_adaptive_verification=false in speculative_config",
    ),
    GateRule(
        "diffusion_decoding",
        GateStatus.REFUSED,
        "a model that decodes by diffusion: a token's row is computed again until its canvas is done",
        lambda f: f.decodes_by_diffusion,
        lambda f: (
            "a model that decodes by diffusion computes the rows of its canvas again in each step, and says only later "
            "which of them stay"
        ),
        "turn the cache off for this model",
    ),
    GateRule(
        "full_graphs",
        GateStatus.REFUSED,
        "a model with further outputs (`take_stage_outputs`) whose whole forward may be replayed as a device graph",
        lambda f: f.hands_out_outputs and f.full_graphs,
        lambda f: (
            "the model hands out further outputs, and a forward that is replayed as one graph runs none of its Python, "
            "so it would hand out those of another step"
        ),
        'set compilation_config={"cudagraph_mode": "PIECEWISE"}',
    ),
    GateRule(
        "priority_scheduling",
        GateStatus.REFUSED,
        "a scheduling policy other than `fcfs`: a block can change hands without the worker hearing of it",
        lambda f: f.scheduling_policy != "fcfs",
        lambda f: (
            f"scheduling_policy={f.scheduling_policy!r}: a block can change hands without the worker hearing of it"
        ),
        "use 'fcfs'",
    ),
    GateRule(
        "fast_prefill",
        GateStatus.REFUSED,
        "`kv_sharing_fast_prefill`: the last layers skip prompt tokens, so their hidden rows are not the model's",
        lambda f: f.kv_sharing_fast_prefill,
        lambda f: (
            "kv_sharing_fast_prefill: the last layers skip prompt tokens, so their hidden rows are not the model's"
        ),
        "turn kv_sharing_fast_prefill off",
    ),
    GateRule(
        "no_full_attention",
        GateStatus.REFUSED,
        "no KV group keeps the blocks of every token (sliding-window layers only): hits do not say where rows are",
        lambda f: full_attention_group(f.attention_group_kinds) is None,
        lambda f: (
            f"KV groups {list(f.attention_group_kinds)}: none keeps the blocks of every token, so a hit does not say "
            "where its rows are"
        ),
        "turn the cache off for this model",
    ),
    GateRule(
        "prefix_replay",
        GateStatus.REFUSED,
        "the engine computes the end of a hit again (`prefix_replay_tokens`): its rows would have two sources",
        lambda f: f.prefix_replay_tokens > 0,
        lambda f: (
            f"prefix_replay_tokens={f.prefix_replay_tokens}: the engine computes the end of a hit again and its rows "
            "would have two sources"
        ),
        "turn the cache off for this model",
    ),
    GateRule(
        "block_size",
        GateStatus.REFUSED,
        "the scheduler's blocks are not whole numbers of the block table's",
        _block_sizes_do_not_fit,
        lambda f: (
            f"blocks of {f.allocator_block_size} tokens are not whole numbers of the block table's "
            f"{f.block_table_block_size}"
        ),
        "pass a block_size that is a multiple of what the attention backend uses",
    ),
    GateRule(
        "no_hidden_rows",
        GateStatus.SUPPORTED,
        "the model's policy keeps no hidden rows (`needs_full_hidden_states` is `False`), with or without deferred "
        "keys: its other keys are stored and joined",
        lambda f: not f.keeps_hidden_rows,
        lambda f: (
            "the model's policy keeps no hidden rows; its other keys with a row per token are stored, "
            f"{f.num_deferred_keys} of those declared deferred"
        ),
    ),
    GateRule(
        "kv_producer",
        GateStatus.SUPPORTED,
        "KV transfer to other engines only (`kv_producer`, with a connector that only stores): nothing is loaded, so "
        "the rows are unaffected",
        lambda f: f.kv_role == "kv_producer",
        lambda f: (
            f"kv_role='kv_producer' with kv_connector={f.kv_connector!r}: this stage computes every row it hands on"
        ),
    ),
    GateRule(
        "hidden_rows",
        GateStatus.SUPPORTED,
        "every other stage: autoregressive, with a full-attention group whose hidden rows feed a next stage",
        lambda f: True,
        lambda f: (
            f"an autoregressive stage; KV group {full_attention_group(f.attention_group_kinds)} of "
            f"{list(f.attention_group_kinds)} keeps the blocks of every token"
        ),
    ),
)
"""The decision table, in the order the rules are asked. The last one always applies."""


def stage_prefix_cache_config(facts: StageFacts) -> GateDecision:
    """Whether a stage gets a cache. Pure; any thread.

    Returns:
        The answer of the first rule of `GATE_RULES` that applies.
    """
    rule = next(rule for rule in GATE_RULES if rule.applies(facts))
    remedy = rule.remedy if rule.remedy_here is None else rule.remedy_here(facts)
    return GateDecision(rule.status, rule.name, rule.reason(facts), remedy)
