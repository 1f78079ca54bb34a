# SPDX-License-Identifier: Apache-2.0
"""The one place that says whether a stage gets a cache. Called by every worker class at KV-cache init."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum


class GateStatus(Enum):
    """The gate's three answers."""

    SUPPORTED = "supported"
    """The stage gets a cache."""
    IGNORED = "ignored"
    """The stage has no use for one; nothing is built and nothing is wrong."""
    REFUSED = "refused"
    """A cache was asked for that cannot give right rows here; start-up must stop."""


@dataclass(frozen=True, slots=True)
class StageFacts:
    """What an integration knows about a stage when its KV cache is made."""

    enabled: bool
    """The operator asked for the cache."""
    prefix_caching: bool = True
    is_output_rank: bool = True
    """The rank whose outputs the engine uses: last pipeline rank, tensor-parallel rank 0."""
    is_pooling: bool = False
    kv_role: str | None = None
    """vLLM's `kv_transfer_config.kv_role`, if any."""
    attention_group_kinds: tuple[str, ...] = ("full_attention",)
    """Kind of each KV-cache group, such as `full_attention`, `sliding_window`, `mamba`."""
    num_speculative_tokens: int = 0
    scheduling_policy: str = "fcfs"
    decode_context_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    scheduler_block_size: int | None = None
    """vLLM's `cache_config.block_size`."""
    block_table_block_size: int | None = None
    """Tokens per entry of the runner's block table."""
    kv_sharing_fast_prefill: bool = False
    """vLLM's `cache_config.kv_sharing_fast_prefill`: layers that share KV skip prompt tokens."""
    engine_version: str | None = None
    engine_version_problem: str | None = None
    """Why this engine version is not supported, or `None`."""


@dataclass(frozen=True, slots=True)
class GateDecision:
    """The answer, with the rule that gave it."""

    status: GateStatus
    rule: str
    reason: str


@dataclass(frozen=True, slots=True)
class GateRule:
    """One row of the decision table: the first row that applies decides."""

    name: str
    status: GateStatus
    applies: Callable[[StageFacts], bool]
    reason: Callable[[StageFacts], str]


def _effective_block_sizes_differ(facts: StageFacts) -> bool:
    sizes = {s for s in (facts.scheduler_block_size, facts.block_table_block_size) if s is not None}
    return len(sizes) > 1


GATE_RULES: tuple[GateRule, ...] = (
    GateRule(
        "not_enabled",
        GateStatus.IGNORED,
        lambda f: not f.enabled,
        lambda f: "the cache is off; set enabled=true in additional_config's omni_core section to turn it on",
    ),
    GateRule(
        "version",
        GateStatus.REFUSED,
        lambda f: f.engine_version_problem is not None,
        lambda f: f"unsupported engine version {f.engine_version}: {f.engine_version_problem}",
    ),
    GateRule(
        "pooling",
        GateStatus.IGNORED,
        lambda f: f.is_pooling,
        lambda f: "a pooling stage hands on no rows per token",
    ),
    GateRule(
        "prefix_caching_off",
        GateStatus.IGNORED,
        lambda f: not f.prefix_caching,
        lambda f: "enable_prefix_caching is off: the engine skips no tokens, so every row comes out anyway",
    ),
    GateRule(
        "not_output_rank",
        GateStatus.IGNORED,
        lambda f: not f.is_output_rank,
        lambda f: "this rank's outputs are not used by the engine; the output rank holds the cache",
    ),
    GateRule(
        "kv_consumer",
        GateStatus.REFUSED,
        lambda f: f.kv_role in ("kv_consumer", "kv_both"),
        lambda f: (
            f"kv_role={f.kv_role!r}: KV received from a producer counts as computed, but its rows were never "
            "computed here; turn the cache off on this stage or make it producer-only"
        ),
    ),
    GateRule(
        "context_parallel",
        GateStatus.REFUSED,
        lambda f: f.decode_context_parallel_size > 1 or f.prefill_context_parallel_size > 1,
        lambda f: (
            f"context parallelism (decode {f.decode_context_parallel_size}, prefill "
            f"{f.prefill_context_parallel_size}) stripes tokens over ranks; set both sizes to 1"
        ),
    ),
    GateRule(
        "speculation",
        GateStatus.REFUSED,
        lambda f: f.num_speculative_tokens > 0,
        lambda f: (
            f"num_speculative_tokens={f.num_speculative_tokens}: this version's worker does not tell the cache how "
            "many drafts were accepted; remove speculative_config"
        ),
    ),
    GateRule(
        "priority_scheduling",
        GateStatus.REFUSED,
        lambda f: f.scheduling_policy != "fcfs",
        lambda f: (
            f"scheduling_policy={f.scheduling_policy!r}: a block can change hands without the worker hearing of "
            "it; use 'fcfs'"
        ),
    ),
    GateRule(
        "fast_prefill",
        GateStatus.REFUSED,
        lambda f: f.kv_sharing_fast_prefill,
        lambda f: (
            "kv_sharing_fast_prefill: the last layers skip prompt tokens, so their hidden rows are not the model's; "
            "turn kv_sharing_fast_prefill off"
        ),
    ),
    GateRule(
        "no_full_attention",
        GateStatus.REFUSED,
        lambda f: "full_attention" not in f.attention_group_kinds,
        lambda f: (
            f"KV groups {list(f.attention_group_kinds)}: this version mirrors a full-attention group, in "
            "which a hit names all its blocks; turn the cache off for this model"
        ),
    ),
    GateRule(
        "hybrid_groups",
        GateStatus.REFUSED,
        lambda f: len(f.attention_group_kinds) > 1,
        lambda f: (
            f"KV groups {list(f.attention_group_kinds)}: hybrid models are not mirrored by this version; "
            "turn the cache off for this model"
        ),
    ),
    GateRule(
        "block_size",
        GateStatus.REFUSED,
        _effective_block_sizes_differ,
        lambda f: (
            f"the scheduler's block_size={f.scheduler_block_size} disagrees with the block table's "
            f"{f.block_table_block_size}; pass a block_size that the attention backend uses as it is"
        ),
    ),
)
"""The decision table, in the order the rules are asked."""


def stage_prefix_cache_config(facts: StageFacts) -> GateDecision:
    """Whether a stage gets a cache. Pure; any thread.

    Returns:
        The first rule of `GATE_RULES` that applies, or `supported`.
    """
    for rule in GATE_RULES:
        if rule.applies(facts):
            return GateDecision(rule.status, rule.name, rule.reason(facts))
    return GateDecision(GateStatus.SUPPORTED, "supported", "one full-attention group, prefix caching on, output rank")
