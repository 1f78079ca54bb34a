# SPDX-License-Identifier: Apache-2.0
"""Tells the gate what kind of stage this is, and makes the cache's configuration from vLLM's."""

from __future__ import annotations

from typing import Any

from omni_core.integrations.vllm.errors import GateRefusedError
from omni_core.integrations.vllm.settings import OmniSettings
from omni_core.integrations.vllm.versions import engine_version_problem
from omni_core.prefix_cache.config import PrefixCacheConfig
from omni_core.prefix_cache.gate import GateDecision, GateStatus, StageFacts, stage_prefix_cache_config

GROUP_INDEX = 0
"""The KV-cache group that is mirrored. The gate lets stages with one group through only."""


def stage_facts(
    settings: OmniSettings,
    vllm_config: Any,
    *,
    is_output_rank: bool,
    is_pooling: bool,
    attention_group_kinds: tuple[str, ...],
    block_table_block_size: int | None,
    engine_version: str,
    uses_v2_runner: bool = False,
) -> StageFacts:
    """The facts of a stage whose KV cache has just been made. Pure; reads `vllm_config` (vLLM's `VllmConfig`)."""
    cache_config = vllm_config.cache_config
    parallel_config = vllm_config.parallel_config
    transfer = vllm_config.kv_transfer_config
    speculative = vllm_config.speculative_config
    return StageFacts(
        enabled=settings.enabled,
        prefix_caching=bool(cache_config.enable_prefix_caching),
        is_output_rank=is_output_rank,
        is_pooling=is_pooling,
        kv_role=None if transfer is None else transfer.kv_role,
        attention_group_kinds=attention_group_kinds,
        num_speculative_tokens=0 if speculative is None else speculative.num_speculative_tokens or 0,
        scheduling_policy=str(vllm_config.scheduler_config.policy),
        decode_context_parallel_size=parallel_config.decode_context_parallel_size,
        prefill_context_parallel_size=parallel_config.prefill_context_parallel_size,
        scheduler_block_size=cache_config.block_size,
        block_table_block_size=block_table_block_size,
        kv_sharing_fast_prefill=bool(cache_config.kv_sharing_fast_prefill),
        engine_version=engine_version,
        engine_version_problem=engine_version_problem(engine_version, uses_v2_runner=uses_v2_runner),
    )


def decide(facts: StageFacts) -> GateDecision:
    """Ask the gate.

    Raises:
        GateRefusedError: the gate refuses; names the rule and the reason.
    """
    decision = stage_prefix_cache_config(facts)
    if decision.status is GateStatus.REFUSED:
        raise GateRefusedError(f"Omni Core cannot serve this stage ({decision.rule}): {decision.reason}")
    return decision


def cache_config(settings: OmniSettings, vllm_config: Any, *, num_blocks: int, block_size: int) -> PrefixCacheConfig:
    """The cache's configuration for a stage the gate let through.

    Args:
        settings: the operator's.
        vllm_config: vLLM's `VllmConfig`.
        num_blocks: blocks of the KV cache, the null block included (`KVCacheConfig.num_blocks`).
        block_size: tokens per entry of the runner's block table.

    Raises:
        InvalidConfigError: a value the cache cannot run with.
    """
    model_config = vllm_config.model_config
    return PrefixCacheConfig(
        num_blocks=num_blocks,
        block_size=block_size,
        hidden_size=model_config.get_hidden_size(),
        hidden_dtype=model_config.dtype,
        max_num_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        staging_depth=settings.staging_depth,
        extra_row_bytes=settings.extra_row_bytes,
        staging_claim_timeout_s=settings.staging_claim_timeout_s,
        join_timeout_s=settings.join_timeout_s,
        caches_per_host=max(1, vllm_config.parallel_config.data_parallel_size_local),
    )
