# SPDX-License-Identifier: Apache-2.0
"""Every setting of a diffusion stage's keys and values, by the name an operator writes. Nothing is checked here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class DiffusionKVMode(StrEnum):
    """Who owns the keys and values of a diffusion stage."""

    DENSE_LEGACY = "dense_legacy"
    """The model, each request's in one piece."""
    PAGED_SCHEDULER = "paged_scheduler"
    """The scheduler hands out pages; the worker holds them."""
    PAGED_WORKER_LOCAL = "paged_worker_local"
    """A reserved name, always refused."""


class AttentionOwnerKind(StrEnum):
    """What attends over pages."""

    KERNEL = "kernel"
    """vLLM's CPU attention kernel, piece by piece: fast."""
    GATHERED = "gathered"
    """Gathered pages and torch's attention with an explicit mask: the reference, any dtype."""


class SequenceParallelKind(StrEnum):
    """How the tokens of a row would be split over ranks."""

    NONE = "none"
    ULYSSES = "ulysses"
    """All-to-all, every rank the same number of heads."""
    ULYSSES_UNEVEN = "ulysses_uneven"
    """All-to-all with heads that do not divide evenly."""
    RING = "ring"
    HYBRID = "hybrid"
    """Ulysses within a ring."""
    ALL_GATHER = "all_gather"


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusionKVSettings:
    """The settings of one diffusion stage. `config.DiffusionKVConfig` is the same, checked."""

    diffusion_kv_mode: DiffusionKVMode = DiffusionKVMode.DENSE_LEGACY
    """Who owns keys and values: `dense_legacy`, the model; `paged_scheduler`, the scheduler, in pages."""
    enable_prefix_caching: bool = False
    """Whether requests share the pages of equal prefixes."""
    span_safe_hits: bool = False
    """Whether a hit is rounded down so that it never ends inside an image."""
    diffusion_kv_max_rows_per_request: int | None = None
    """CFG rows a request may have: 1 without CFG, 2 with it. Wanted with `paged_scheduler`."""
    block_size: int = 32
    """Tokens per page."""
    attention_owner: AttentionOwnerKind = AttentionOwnerKind.KERNEL
    """What attends over pages: `kernel`, vLLM's CPU kernel; `gathered`, torch's attention over gathered pages."""
    kv_cache_memory_bytes: int | None = None
    """Bytes of pages per rank. Unset: by `gpu_memory_utilization`."""
    gpu_memory_utilization: float = 0.9
    """Share of a rank's memory the stage may use, pages included."""
    max_model_len: int = -1
    """Tokens of the longest row; -1 takes what the pages allow, at most the largest request's."""
    max_num_seqs: int = 1
    """Requests that run at once. Each of their rows is a sequence to vLLM."""
    max_wave_requests: int | None = None
    """Requests that share a forward at most. Unset: `max_num_seqs`."""
    kv_cache_layout: str | None = None
    """vLLM's name of the pages' layout in memory. Unset: that of `attention_owner`."""
    tensor_parallel_size: int = 1
    """Ranks that share the heads of every layer."""
    cfg_parallel_size: int = 1
    """Ranks that share the CFG rows, one each."""
    sequence_parallel_size: int = 1
    """Ranks that share the tokens of a row. Only 1 is built."""
    sequence_parallel_kind: SequenceParallelKind = SequenceParallelKind.NONE
    """How they would share them. Only `none` is built."""
    enable_sleep_mode: bool = False
    """Whether the stage's device memory may be discarded between requests."""
    kv_transfer_config: Mapping[str, Any] | None = None
    """vLLM's connector that would bring keys and values of another stage. Not built."""
    need_recv_cache: bool = False
    """Whether the model would receive contiguous keys and values of another stage. Not built."""
    need_send_cache: bool = False
    """Whether the model would send its contiguous keys and values on. Not built."""
    async_chunk: bool = False
    """Whether stages would hand each other unfinished outputs. Not built."""
    step_execution: bool = False
    """Whether requests at different steps would share a forward. Not built."""
    continuous_batching: bool = False
    """Whether requests would join a running wave. Not built."""
    cache_backend: str | None = None
    """A cache that skips denoise steps, such as `tea_cache`. Not built."""
    quantization: str | None = None
    """Quantised weights, keys or values. Not built."""
    enable_cpu_offload: bool = False
    """Whether weights would wait in host memory. Not built."""
