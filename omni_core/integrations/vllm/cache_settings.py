# SPDX-License-Identifier: Apache-2.0
"""Makes the cache's configuration from a stage's settings: the one place that knows which setting is which."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from omni_core.prefix_cache.config import PrefixCacheConfig
from omni_core.settings.stage_settings import StageSettings


@dataclass(frozen=True, slots=True)
class StageGeometry:
    """What the engine and the model say of a stage."""

    num_blocks: int
    """Blocks of the KV cache, the null block included."""
    block_size: int
    """Tokens per block of the mirrored group."""
    hidden_size: int
    hidden_dtype: torch.dtype
    max_num_tokens: int
    """vLLM's `max_num_batched_tokens`."""
    caches_per_host: int = 1
    """vLLM's `data_parallel_size_local`."""


def config_of(settings: StageSettings, geometry: StageGeometry) -> PrefixCacheConfig:
    """The configuration of a stage's cache, without what chosen layers add. Pure.

    Raises:
        InvalidConfigError: a value the cache cannot run with.
    """
    return PrefixCacheConfig(
        num_blocks=geometry.num_blocks,
        block_size=geometry.block_size,
        hidden_size=geometry.hidden_size,
        hidden_dtype=geometry.hidden_dtype,
        max_num_tokens=geometry.max_num_tokens,
        caches_per_host=geometry.caches_per_host,
        staging_depth=settings.staging_depth,
        extra_row_bytes=settings.extra_row_bytes,
        extra_step_bytes=settings.extra_step_bytes,
        device_staging_bytes=settings.device_staging_bytes,
        staging_claim_timeout_s=settings.staging_claim_timeout_s,
        join_timeout_s=settings.join_timeout_s,
        max_recycled_bytes=settings.max_recycled_bytes,
        pin_chunk_bytes=settings.pin_chunk_bytes,
        pretouch=settings.pretouch,
    )
