# SPDX-License-Identifier: Apache-2.0
"""What the gate is told about a stage."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from omni_core.prefix_cache.gate_platforms import ModelRunner


class StageKind(Enum):
    """What a stage computes."""

    AUTOREGRESSIVE = "autoregressive"
    """Tokens one after the other, each with a row that a later stage may want: a thinker, a talker."""
    POOLING = "pooling"
    """One vector or score per request."""
    CODEC_DECODER = "codec_decoder"
    """A waveform from a whole sequence of codes at once: a vocoder, a code-to-wave stage."""
    DIFFUSION = "diffusion"
    """Pictures, sound or video by denoising: a diffusion transformer."""


@dataclass(frozen=True, slots=True)
class StageFacts:
    """What an integration knows about a stage when its KV cache is made."""

    enabled: bool
    """The operator asked for the cache."""
    device_type: str = "cpu"
    """vLLM's `device_config.device_type`."""
    model_runner: ModelRunner = ModelRunner.V1
    kind: StageKind = StageKind.AUTOREGRESSIVE
    prefix_caching: bool = True
    is_output_rank: bool = True
    """The rank whose outputs the engine uses: last pipeline rank, tensor-parallel rank 0."""
    keeps_hidden_rows: bool = True
    """The model's `ModelCachePolicy.needs_full_hidden_states`."""
    num_deferred_keys: int = 0
    """How many `deferred_keys` the model's policy declares."""
    kv_role: str | None = None
    """vLLM's `kv_transfer_config.kv_role`, if any."""
    kv_connector: str | None = None
    """vLLM's `kv_transfer_config.kv_connector`, if any."""
    attention_group_kinds: tuple[str, ...] = ("full_attention",)
    """Kind of each KV-cache group, such as `full_attention`, `sliding_window`, `mamba`."""
    num_speculative_tokens: int = 0
    async_scheduling: bool = False
    """Whether a step is scheduled before the one before it has been sampled."""
    adaptive_verification: bool = False
    """Whether the second model runner chooses on the device which drafts to verify."""
    decodes_by_diffusion: bool = False
    """Whether tokens come a canvas at a time, each computed again and again (vLLM: `ModelConfig.is_diffusion`)."""
    hands_out_outputs: bool = False
    """Whether the model has further outputs beside its hidden state (`take_stage_outputs`)."""
    full_graphs: bool = False
    """Whether whole forwards may be replayed as device graphs, without any Python of the model."""
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
    engine_version_remedy: str = ""
    """What to do about it."""
