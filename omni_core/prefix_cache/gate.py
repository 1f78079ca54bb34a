# SPDX-License-Identifier: Apache-2.0
"""The one place that says whether a stage gets a cache. Called by every worker class at KV-cache init."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

FULL_ATTENTION_KINDS = frozenset({"full_attention", "mla_attention"})
"""Kinds of KV-cache groups whose block table names the blocks of all tokens (vLLM: `FullAttentionManager`)."""

STORE_ONLY_CONNECTORS = frozenset({"ExampleHiddenStatesConnector", "MooncakeConnector"})
"""KV connectors of vLLM 0.32 that never load in the role `kv_producer`, by `get_num_new_matched_tokens` of each."""


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
    kv_connector: str | None = None
    """vLLM's `kv_transfer_config.kv_connector`, if any."""
    attention_group_kinds: tuple[str, ...] = ("full_attention",)
    """Kind of each KV-cache group, such as `full_attention`, `sliding_window`, `mamba`."""
    num_speculative_tokens: int = 0
    async_scheduling: bool = False
    """Whether a step is scheduled before the one before it has been sampled."""
    scheduling_policy: str = "fcfs"
    decode_context_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    prefix_replay_tokens: int = 0
    """Tokens of a hit that the engine computes again (vLLM: `KVCacheSpec.prefix_replay_tokens`, the largest)."""
    allocator_block_size: int | None = None
    """Tokens per block of the mirrored group, as the scheduler gives them out."""
    block_table_block_size: int | None = None
    """Tokens per entry of the runner's block table; may be smaller than the allocator's."""
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


def full_attention_group(attention_group_kinds: Sequence[str]) -> int | None:
    """Index of the KV-cache group a cache mirrors: the first in which a hit names all of a request's blocks. Pure.

    Groups of other kinds name the null block for tokens outside their window, or keep one state per block.
    """
    return next((index for index, kind in enumerate(attention_group_kinds) if kind in FULL_ATTENTION_KINDS), None)


def _block_sizes_do_not_fit(facts: StageFacts) -> bool:
    allocator, table = facts.allocator_block_size, facts.block_table_block_size
    return allocator is not None and table is not None and allocator % table != 0


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
            "computed here; turn the cache off on this stage"
        ),
    ),
    GateRule(
        "kv_connector",
        GateStatus.REFUSED,
        lambda f: f.kv_connector is not None and f.kv_connector not in STORE_ONLY_CONNECTORS,
        lambda f: (
            f"kv_connector={f.kv_connector!r} may load KV as a producer too; what it loads counts as computed, but its "
            f"rows were never computed here; use one that only stores ({', '.join(sorted(STORE_ONLY_CONNECTORS))}), or "
            "turn the cache off on this stage"
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
        "async_speculation",
        GateStatus.REFUSED,
        lambda f: f.async_scheduling and f.num_speculative_tokens > 0,
        lambda f: (
            f"num_speculative_tokens={f.num_speculative_tokens} with async_scheduling: the worker learns too late "
            "which drafts were accepted; turn async_scheduling off or remove speculative_config"
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
        lambda f: full_attention_group(f.attention_group_kinds) is None,
        lambda f: (
            f"KV groups {list(f.attention_group_kinds)}: none keeps the blocks of every token, so a hit does not say "
            "where its rows are; turn the cache off for this model"
        ),
    ),
    GateRule(
        "prefix_replay",
        GateStatus.REFUSED,
        lambda f: f.prefix_replay_tokens > 0,
        lambda f: (
            f"prefix_replay_tokens={f.prefix_replay_tokens}: the engine computes the end of a hit again and its rows "
            "would have two sources; turn the cache off for this model"
        ),
    ),
    GateRule(
        "block_size",
        GateStatus.REFUSED,
        _block_sizes_do_not_fit,
        lambda f: (
            f"blocks of {f.allocator_block_size} tokens are not whole numbers of the block table's "
            f"{f.block_table_block_size}; pass a block_size that is a multiple of what the attention backend uses"
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
    return GateDecision(GateStatus.SUPPORTED, "supported", "a full-attention group, prefix caching on, output rank")
