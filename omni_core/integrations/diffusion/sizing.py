# SPDX-License-Identifier: Apache-2.0
"""How many pages the memory of the ranks holds, by vLLM's own functions.

Facts of vLLM 0.32 (`v1/core/kv_cache_utils.py`): `get_kv_cache_configs`, `generate_scheduler_kv_cache_config` and
`resolve_kv_cache_block_sizes` plan an engine. They read a `VllmConfig`, and of its model only two lengths; they raise
until a KV layout is chosen, which an engine does on a path that is not ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from vllm.config import CacheConfig, DeviceConfig, SchedulerConfig, VllmConfig
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_kv_cache_configs,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import FullAttentionSpec

from omni_core.diffusion_kv.attention.owner import KVShape
from omni_core.diffusion_kv.errors import DiffusionKVConfigError

AUTO_FIT = -1
"""`max_model_len`: the longest row the pool can hold."""

_LAYOUT = "LBHNC"
"""Layers outermost. Only the arithmetic of one geometry depends on it, and that the same in every layout."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """What one rank has for its keys and values."""

    shape: KVShape
    available_bytes: int


@dataclass(frozen=True, slots=True)
class PoolDemand:
    """What the pool is for."""

    block_size: int
    """Tokens per page."""
    max_rows: int
    """`diffusion_kv_max_rows_per_request`."""
    max_num_seqs: int
    """Public requests that run at once."""
    max_model_len: int
    """Tokens of the longest row that is served, or `AUTO_FIT`."""
    longest_row_tokens: int | None = None
    """Of the profile request. A stage of a set `max_model_len` must hold it; `AUTO_FIT` goes no further than it."""
    num_blocks: int | None = None
    """Pages, the null page included, whatever the memory; `None`: as many as fit."""


@dataclass(frozen=True, slots=True)
class KVPool:
    """The pool every rank can hold."""

    num_blocks: int
    """Pages, vLLM's null page included."""
    block_size: int
    max_model_len: int
    kv_cache_config: Any
    """vLLM's `KVCacheConfig` of the scheduler: one group of full attention."""


def register_kv_cache_specs() -> None:
    """Tell vLLM which manager serves which kind of attention, as its engine does at start. Again is harmless.

    vLLM's `init_none_hash` is not called: every chain here has a root of its own, and in a process that serves an
    autoregressive stage too it would move that stage's root.
    """
    register_all_kvcache_specs(None)


def plan_pool(ranks: Sequence[RankMemory], demand: PoolDemand) -> KVPool:
    """The pool of a stage, sized by its smallest rank. Takes milliseconds; allocates nothing.

    Raises:
        DiffusionKVConfigError: ranks of different shapes, a demand out of range, or a pool that cannot hold the
            longest request.
    """
    _check(ranks, demand)
    register_kv_cache_specs()
    vllm_config = _vllm_config(demand)
    try:
        configs = get_kv_cache_configs(
            vllm_config,
            [_specs(rank.shape, demand.block_size) for rank in ranks],
            [rank.available_bytes for rank in ranks],
        )
    except ValueError as error:
        raise DiffusionKVConfigError(
            f"the KV pool cannot hold one row: max_model_len={demand.max_model_len}, {_memory(ranks, demand)}; raise "
            f"kv_cache_memory_bytes or lower max_model_len ({error})"
        ) from error
    kv_cache_config = generate_scheduler_kv_cache_config(configs)
    sizes = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    if len(kv_cache_config.kv_cache_groups) != 1 or sizes != (demand.block_size, demand.block_size):
        raise DiffusionKVConfigError(
            f"{len(kv_cache_config.kv_cache_groups)} KV cache groups with block sizes {sizes}; prefix pages need one "
            f"group of block_size={demand.block_size}"
        )
    max_model_len = _longest_row(kv_cache_config.num_blocks, vllm_config.model_config.max_model_len, ranks, demand)
    return KVPool(kv_cache_config.num_blocks, demand.block_size, max_model_len, kv_cache_config)


def _check(ranks: Sequence[RankMemory], demand: PoolDemand) -> None:
    if not ranks:
        raise DiffusionKVConfigError("no rank reported its KV shape; every rank of the stage does")
    shapes = {rank.shape for rank in ranks}
    if len(shapes) > 1:
        raise DiffusionKVConfigError(
            f"the ranks' keys and values have {len(shapes)} shapes, and one pool has one geometry: "
            f"{', '.join(sorted(map(str, shapes)))}"
        )
    for name in ("block_size", "max_rows", "max_num_seqs", "num_blocks", "longest_row_tokens"):
        value = getattr(demand, name)
        if value is not None and (type(value) is not int or value <= 0):
            raise DiffusionKVConfigError(f"{name}={value!r}; it is a positive int")
    if demand.max_model_len != AUTO_FIT and demand.max_model_len <= 0:
        raise DiffusionKVConfigError(
            f"max_model_len={demand.max_model_len}; it is positive, or {AUTO_FIT} for the longest row that fits"
        )
    if demand.max_model_len == AUTO_FIT and demand.longest_row_tokens is None:
        raise DiffusionKVConfigError(
            f"max_model_len={AUTO_FIT} and the model tells no longest row; set max_model_len to its tokens"
        )


def _vllm_config(demand: PoolDemand) -> Any:
    longest = demand.longest_row_tokens if demand.max_model_len == AUTO_FIT else demand.max_model_len
    assert longest is not None
    num_sequences = demand.max_num_seqs * demand.max_rows  # to vLLM each row is a sequence
    vllm_config = VllmConfig(
        cache_config=CacheConfig(block_size=demand.block_size, num_gpu_blocks_override=demand.num_blocks),
        device_config=DeviceConfig("cpu"),
        scheduler_config=SchedulerConfig(
            max_model_len=longest,
            is_encoder_decoder=False,
            max_num_seqs=num_sequences,
            max_num_batched_tokens=max(longest, num_sequences),
        ),
    )
    vllm_config.model_config = SimpleNamespace(max_model_len=longest, original_max_model_len=demand.max_model_len)
    # A platform may have adjusted it.
    vllm_config.cache_config.block_size = demand.block_size
    vllm_config.cache_config.kv_cache_layout = _LAYOUT
    return vllm_config


def _specs(shape: KVShape, block_size: int) -> dict[str, Any]:
    spec = FullAttentionSpec(
        block_size=block_size,
        num_kv_heads=shape.num_kv_heads,
        head_size=shape.head_size,
        dtype=shape.dtype,
        non_causal=True,
    )
    return {f"layers.{index}": spec for index in range(shape.num_layers)}


def _longest_row(num_blocks: int, planned_tokens: int, ranks: Sequence[RankMemory], demand: PoolDemand) -> int:
    """Tokens of the longest row whose request, with all its rows, the pool can hold; vLLM plans for one row."""
    with_all_rows = (num_blocks - 1) // demand.max_rows * demand.block_size
    if demand.max_model_len == AUTO_FIT:
        planned_tokens = min(planned_tokens, with_all_rows)
    wanted = min(planned_tokens, demand.longest_row_tokens or 0)
    if planned_tokens <= 0 or wanted > with_all_rows:
        raise DiffusionKVConfigError(
            f"the KV pool has {num_blocks - 1} pages of {demand.block_size} tokens and cannot hold one request of "
            f"{demand.max_rows} rows of {demand.longest_row_tokens} tokens, {_memory(ranks, demand)}; raise "
            "kv_cache_memory_bytes, or serve smaller requests"
        )
    return planned_tokens


def _memory(ranks: Sequence[RankMemory], demand: PoolDemand) -> str:
    if demand.num_blocks is not None:
        return f"num_blocks={demand.num_blocks}"
    return f"{min(rank.available_bytes for rank in ranks)} bytes on the smallest of {len(ranks)} ranks"
