# SPDX-License-Identifier: Apache-2.0
"""Tells the gate what kind of stage this is, and makes the cache's configuration from vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from omni_core.integrations.vllm.cache_settings import StageGeometry, config_of
from omni_core.integrations.vllm.chosen_layers import ChosenLayers
from omni_core.integrations.vllm.errors import GateRefusedError
from omni_core.integrations.vllm.releases.engine_contract import EngineFact
from omni_core.integrations.vllm.releases.engine_releases import engine_version_problem
from omni_core.integrations.vllm.versions import decodes_by_diffusion, verifies_adaptively
from omni_core.prefix_cache.config import PrefixCacheConfig
from omni_core.prefix_cache.gate import GateDecision, GateStatus, stage_prefix_cache_config
from omni_core.prefix_cache.gate_facts import StageFacts, StageKind
from omni_core.prefix_cache.gate_platforms import ModelRunner
from omni_core.prefix_cache.policy import ModelCachePolicy
from omni_core.settings.stage_settings import StageSettings


@dataclass(frozen=True, slots=True)
class KvGroups:
    """What is known of a stage's KV-cache groups once they are made."""

    kinds: tuple[str, ...] = ("full_attention",)
    """Kind of each group, in vLLM's own words."""
    prefix_replay_tokens: int = 0
    """The largest of all groups."""
    allocator_block_size: int | None = None
    """Tokens per block of the group that is mirrored."""
    block_table_block_size: int | None = None
    """Tokens per entry of that group's block table; `None` if the runner keeps none on the host."""


def stage_facts(
    settings: StageSettings,
    vllm_config: Any,
    *,
    engine_version: str,
    engine_lacks: Sequence[EngineFact] = (),
    uses_v2_runner: bool = False,
    is_output_rank: bool = True,
    kv_groups: KvGroups | None = None,
    policy: ModelCachePolicy | None = None,
    hands_out_outputs: bool = False,
) -> StageFacts:
    """The facts of a stage. Pure; reads `vllm_config` (vLLM's `VllmConfig`).

    Args:
        settings: the operator's.
        vllm_config: vLLM's configuration, resolved.
        engine_version: vLLM's.
        engine_lacks: facts of the contract that its source text does not have.
        uses_v2_runner: whether the worker runs vLLM's second model runner.
        is_output_rank: to be left out before the distributed groups exist.
        kv_groups: to be left out before the KV cache is made; what it would say is then taken to be right.
        policy: the model's; to be left out before it is loaded.
        hands_out_outputs: whether the model has further outputs; to be left out before it is loaded.
    """
    cache_config = vllm_config.cache_config
    parallel_config = vllm_config.parallel_config
    transfer = vllm_config.kv_transfer_config
    speculative = vllm_config.speculative_config
    groups = kv_groups or KvGroups()
    declared = policy or ModelCachePolicy()
    pooling = vllm_config.model_config.runner_type == "pooling"
    device_type = str(vllm_config.device_config.device_type)
    runner = ModelRunner.V2 if uses_v2_runner else ModelRunner.V1
    problem = engine_version_problem(
        engine_version,
        lacking=engine_lacks,
        device_type=device_type,
        runner=runner,
        allow_untested=settings.allow_untested_version,
    )
    return StageFacts(
        enabled=settings.enabled,
        device_type=device_type,
        model_runner=runner,
        kind=StageKind.POOLING if pooling else declared.stage_kind,
        prefix_caching=bool(cache_config.enable_prefix_caching),
        is_output_rank=is_output_rank,
        keeps_hidden_rows=declared.needs_full_hidden_states,
        num_deferred_keys=len(declared.deferred_keys),
        kv_role=None if transfer is None else transfer.kv_role,
        kv_connector=None if transfer is None else transfer.kv_connector,
        attention_group_kinds=groups.kinds,
        num_speculative_tokens=0 if speculative is None else speculative.num_speculative_tokens or 0,
        async_scheduling=bool(vllm_config.scheduler_config.async_scheduling),
        adaptive_verification=verifies_adaptively(vllm_config),
        decodes_by_diffusion=decodes_by_diffusion(vllm_config),
        hands_out_outputs=hands_out_outputs,
        full_graphs=bool(vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs()),
        scheduling_policy=str(vllm_config.scheduler_config.policy),
        decode_context_parallel_size=parallel_config.decode_context_parallel_size,
        prefill_context_parallel_size=parallel_config.prefill_context_parallel_size,
        prefix_replay_tokens=groups.prefix_replay_tokens,
        allocator_block_size=groups.allocator_block_size,
        block_table_block_size=groups.block_table_block_size,
        kv_sharing_fast_prefill=bool(cache_config.kv_sharing_fast_prefill),
        engine_version=engine_version,
        engine_version_problem=None if problem is None else problem.reason,
        engine_version_remedy="" if problem is None else problem.remedy,
    )


def decide(facts: StageFacts) -> GateDecision:
    """Ask the gate.

    Raises:
        GateRefusedError: the gate refuses; names the rule, the reason and what to change.
    """
    decision = stage_prefix_cache_config(facts)
    if decision.status is GateStatus.REFUSED:
        raise GateRefusedError(f"Omni Core cannot serve this stage ({decision.rule}): {decision.explanation}")
    return decision


def cache_config(settings: StageSettings, vllm_config: Any, *, num_blocks: int, block_size: int) -> PrefixCacheConfig:
    """The cache's configuration for a stage the gate let through.

    Args:
        settings: the operator's.
        vllm_config: vLLM's `VllmConfig`.
        num_blocks: blocks of the KV cache, the null block included (`KVCacheConfig.num_blocks`).
        block_size: tokens per block of the mirrored group, as the scheduler gives them out.

    Raises:
        InvalidConfigError: a value the cache cannot run with.
    """
    model_config = vllm_config.model_config
    geometry = StageGeometry(
        num_blocks=num_blocks,
        block_size=block_size,
        hidden_size=model_config.get_hidden_size(),
        hidden_dtype=model_config.dtype,
        max_num_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        caches_per_host=max(1, vllm_config.parallel_config.data_parallel_size_local),
    )
    config = config_of(settings, geometry)
    layers = ChosenLayers(settings.captured_layers)
    return replace(
        config,
        extra_row_bytes=config.extra_row_bytes + layers.row_bytes(geometry.hidden_size, geometry.hidden_dtype),
        key_rows=layers.key_rows(geometry.hidden_size, geometry.hidden_dtype),
    )
