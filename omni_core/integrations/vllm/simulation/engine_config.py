# SPDX-License-Identifier: Apache-2.0
"""Builds vLLM's scheduler without a model: a configuration of a few lines, KV groups made by hand, nothing downloaded.

Facts of vLLM 0.32: `Scheduler` reads `VllmConfig`, `KVCacheConfig` and two block sizes, which the engine core gets
from `resolve_kv_cache_block_sizes` (`v1/core/kv_cache_utils.py`), and touches no device. Its `use_v2_model_runner`
says which form its outputs have.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig, SpeculativeConfig, VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.structured_output import StructuredOutputManager

from omni_core.integrations.vllm.simulation.shape import KvGroups, VllmShape, v2_runner_form
from omni_core.testing.scheduler_config import SchedulerConfig as SimSchedulerConfig

_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 1 << 20,
    "dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 1,
}


@dataclass(frozen=True, slots=True)
class BuiltScheduler:
    """vLLM's scheduler and what a driver must know of it."""

    scheduler: Any
    """A `vllm.v1.core.sched.scheduler.Scheduler`."""
    kv_cache_config: Any
    block_hasher: Callable[[Any], list[bytes]]
    """Hashes the blocks of a vLLM `Request`."""
    mirrored_group: int
    """Index of the KV-cache group whose slots the stage cache mirrors."""
    hashes_per_block: int
    """Entries of `Request.block_hashes` per block of the mirrored group."""
    table_width: int
    """Most blocks a row of the worker's block table holds for that group."""


def build_scheduler(config: SimSchedulerConfig, shape: VllmShape) -> BuiltScheduler:
    """Build the scheduler. Takes milliseconds once vLLM is imported; writes a small file into a temporary folder.

    Raises:
        ValueError: settings that do not go together.
    """
    shape.check(config)
    vllm_config = _vllm_config(config, shape)
    kv_cache_config = _kv_cache_config(config, shape)
    block_size, hash_block_size = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    init_none_hash(sha256)
    make = AsyncScheduler if shape.async_scheduling else Scheduler
    scheduler = make(
        vllm_config=vllm_config,
        kv_cache_config=kv_cache_config,
        structured_output_manager=StructuredOutputManager(vllm_config),
        block_size=block_size,
        hash_block_size=hash_block_size,
        log_stats=False,
    )
    scheduler.use_v2_model_runner = v2_runner_form(config)
    scheduler.num_lookahead_tokens = shape.lookahead_tokens
    # A text model has no budget for images; with one, prompts with images are scheduled and nothing else changes.
    scheduler.max_num_encoder_input_tokens = 1 << 20
    scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=1 << 20)
    group = mirrored_group_index(kv_cache_config)
    spec = kv_cache_config.kv_cache_groups[group].kv_cache_spec
    return BuiltScheduler(
        scheduler,
        kv_cache_config,
        get_request_block_hasher(hash_block_size, sha256),
        group,
        spec.block_size // hash_block_size,
        spec.max_num_blocks_per_req(vllm_config, shape.max_model_len),
    )


def mirrored_group_index(kv_cache_config: Any) -> int:
    """The KV-cache group to mirror: the one of full attention, in which a hit names every block.

    Raises:
        ValueError: there is none, or more than one.
    """
    kinds = [type(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups]
    found = [index for index, kind in enumerate(kinds) if issubclass(kind, FullAttentionSpec)]
    if len(found) != 1:
        names = [kind.__name__ for kind in kinds]
        raise ValueError(f"KV groups {names}: exactly one of full attention can be mirrored, found {len(found)}")
    return found[0]


def _vllm_config(config: SimSchedulerConfig, shape: VllmShape) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(_MODEL))
        model_config = ModelConfig(
            model=folder,
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=shape.max_model_len,
            enforce_eager=True,
        )
        scheduler_config = SchedulerConfig(
            max_model_len=shape.max_model_len,
            is_encoder_decoder=False,
            max_num_seqs=config.max_num_requests,
            max_num_batched_tokens=config.max_num_tokens,
            long_prefill_token_threshold=config.max_chunk_tokens or 0,
            enable_chunked_prefill=True,
            async_scheduling=shape.async_scheduling,
            scheduler_reserve_full_isl=shape.reserve_full_prompt,
            policy="priority" if config.mishaps.taken_back else "fcfs",
        )
        cache_config = CacheConfig(
            block_size=config.block_size,
            enable_prefix_caching=True,
            prefix_match_unit=shape.match_unit,
            mamba_cache_mode="align" if shape.kv_groups is KvGroups.MAMBA_THEN_FULL else "none",
        )
        cache_config.num_gpu_blocks = config.num_blocks
        speculative_config = (
            SpeculativeConfig(
                # The scheduler asks the method only whether steps may be scheduled before drafts are known.
                method="ngram_gpu" if shape.async_scheduling else "ngram",
                num_speculative_tokens=config.max_draft_tokens,
                prompt_lookup_min=1,
                prompt_lookup_max=3,
                target_model_config=model_config,
                target_parallel_config=ParallelConfig(),
            )
            if config.max_draft_tokens
            else None
        )
        vllm_config = VllmConfig(
            model_config=model_config,
            cache_config=cache_config,
            scheduler_config=scheduler_config,
            speculative_config=speculative_config,
        )
    # A platform may have adjusted these; the workload has been drawn for what it asked for.
    vllm_config.scheduler_config.async_scheduling = shape.async_scheduling
    vllm_config.cache_config.block_size = config.block_size
    vllm_config.cache_config.mamba_cache_mode = cache_config.mamba_cache_mode
    return vllm_config


def _kv_cache_config(config: SimSchedulerConfig, shape: VllmShape) -> Any:
    attention = {"block_size": config.block_size, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    full = FullAttentionSpec(**attention)
    specs: list[Any] = [full]
    if config.side_group_window is not None:
        sliding = SlidingWindowSpec(**attention, sliding_window=config.side_group_window)
        specs = [full, sliding] if shape.kv_groups is KvGroups.FULL_THEN_SLIDING else [sliding, sliding, full]
    if shape.kv_groups is KvGroups.MAMBA_THEN_FULL:
        mamba = MambaSpec(
            block_size=config.block_size, shapes=((8,),), dtypes=(torch.float32,), mamba_cache_mode="align"
        )
        specs = [mamba, full]
    groups = [KVCacheGroupSpec([f"layer.{index}"], spec) for index, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=config.num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
