# SPDX-License-Identifier: Apache-2.0
"""Every setting, and every two of them, that a diffusion stage refuses before anything is started: one table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from omni_core.diffusion_kv.errors import DiffusionKVConfigError
from omni_core.diffusion_kv.settings import DiffusionKVMode, DiffusionKVSettings, SequenceParallelKind


@dataclass(frozen=True, slots=True)
class Refusal:
    """One line of the table."""

    name: str
    """What a test calls it."""
    applies: Callable[[DiffusionKVSettings], bool]
    message: str
    """`{s.NAME}` stands for a setting's value."""

    def text(self, settings: DiffusionKVSettings) -> str:
        return self.message.format(s=settings)


def _paged(settings: DiffusionKVSettings) -> bool:
    return settings.diffusion_kv_mode is DiffusionKVMode.PAGED_SCHEDULER


def _parallel(kind: SequenceParallelKind) -> Callable[[DiffusionKVSettings], bool]:
    return lambda settings: settings.sequence_parallel_kind is kind


def _below(name: str, least: int) -> Callable[[DiffusionKVSettings], bool]:
    def applies(settings: DiffusionKVSettings) -> bool:
        value = getattr(settings, name)
        return value is not None and value < least

    return applies


def _at_least_one(name: str, meaning: str) -> Refusal:
    return Refusal(name, _below(name, 1), f"{name}={{s.{name}}}; {meaning}, at least 1")


REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "worker_local_mode",
        lambda s: s.diffusion_kv_mode is DiffusionKVMode.PAGED_WORKER_LOCAL,
        "diffusion_kv_mode={s.diffusion_kv_mode} is a reserved name and cannot be run; use paged_scheduler or "
        "dense_legacy",
    ),
    Refusal(
        "prefix_caching_without_pages",
        lambda s: s.enable_prefix_caching and not _paged(s),
        "enable_prefix_caching=True with diffusion_kv_mode={s.diffusion_kv_mode}: only pages are shared; set "
        "diffusion_kv_mode=paged_scheduler, or enable_prefix_caching=False",
    ),
    Refusal(
        "prefix_caching_with_sleep_mode",
        lambda s: s.enable_prefix_caching and s.enable_sleep_mode,
        "enable_prefix_caching=True with enable_sleep_mode=True: sleep discards the pages, and the scheduler would "
        "still find them; set one of the two to False",
    ),
    Refusal(
        "prefix_caching_with_kv_transfer",
        lambda s: s.enable_prefix_caching and s.kv_transfer_config is not None,
        "enable_prefix_caching=True with kv_transfer_config={s.kv_transfer_config}: keys and values that come from "
        "another stage have no identity here; unset kv_transfer_config, or set enable_prefix_caching=False",
    ),
    Refusal(
        "pages_without_max_rows",
        lambda s: _paged(s) and s.diffusion_kv_max_rows_per_request is None,
        "diffusion_kv_mode=paged_scheduler without diffusion_kv_max_rows_per_request; set it to the CFG rows of a "
        "request: 2 for plain CFG, 1 without",
    ),
    _at_least_one("diffusion_kv_max_rows_per_request", "the CFG rows of a request"),
    Refusal(
        "kv_transfer_without_pages",
        lambda s: s.kv_transfer_config is not None and not _paged(s),
        "kv_transfer_config={s.kv_transfer_config} with diffusion_kv_mode={s.diffusion_kv_mode}: a connector fills "
        "pages, and there are none; unset kv_transfer_config",
    ),
    Refusal(
        "kv_transfer_with_sleep_mode",
        lambda s: s.kv_transfer_config is not None and s.enable_sleep_mode,
        "kv_transfer_config={s.kv_transfer_config} with enable_sleep_mode=True: pages that a connector fills would be "
        "discarded; unset kv_transfer_config, or set enable_sleep_mode=False",
    ),
    Refusal(
        "kv_transfer_with_need_recv_cache",
        lambda s: s.kv_transfer_config is not None and s.need_recv_cache,
        "kv_transfer_config={s.kv_transfer_config} with need_recv_cache=True: keys and values would come in twice, to "
        "two owners; unset both",
    ),
    Refusal(
        "kv_transfer_with_need_send_cache",
        lambda s: s.kv_transfer_config is not None and s.need_send_cache,
        "kv_transfer_config={s.kv_transfer_config} with need_send_cache=True: keys and values would be sent by two "
        "owners; unset both",
    ),
    Refusal(
        "kv_transfer_with_async_chunk",
        lambda s: s.kv_transfer_config is not None and s.async_chunk,
        "kv_transfer_config={s.kv_transfer_config} with async_chunk=True: a prefix that is still being made cannot be "
        "transferred; unset both",
    ),
    Refusal(
        "pages_with_need_recv_cache",
        lambda s: _paged(s) and s.need_recv_cache,
        "diffusion_kv_mode=paged_scheduler with need_recv_cache=True: the model would bring keys and values of its own "
        "beside the pages; set need_recv_cache=False",
    ),
    Refusal(
        "kv_transfer",
        lambda s: s.kv_transfer_config is not None,
        "kv_transfer_config={s.kv_transfer_config}: this stage has no connector and computes its own keys and values; "
        "unset kv_transfer_config",
    ),
    Refusal(
        "need_recv_cache",
        lambda s: s.need_recv_cache,
        "need_recv_cache=True: this stage receives no keys and values; set need_recv_cache=False",
    ),
    Refusal(
        "need_send_cache",
        lambda s: s.need_send_cache,
        "need_send_cache=True: this stage sends no keys and values; set need_send_cache=False",
    ),
    Refusal(
        "async_chunk",
        lambda s: s.async_chunk,
        "async_chunk=True: this stage takes and gives whole requests; set async_chunk=False for it",
    ),
    Refusal(
        "kv_cache_memory_bytes",
        _below("kv_cache_memory_bytes", 1),
        "kv_cache_memory_bytes={s.kv_cache_memory_bytes} holds no page; set a positive number, or unset it to size the "
        "pages by gpu_memory_utilization",
    ),
    Refusal(
        "gpu_memory_utilization",
        lambda s: not 0.0 < s.gpu_memory_utilization <= 1.0,
        "gpu_memory_utilization={s.gpu_memory_utilization} is no share of the memory; set a number above 0 and at "
        "most 1",
    ),
    Refusal(
        "max_model_len",
        lambda s: s.max_model_len < 1 and s.max_model_len != -1,
        "max_model_len={s.max_model_len}; set the tokens of the longest row, at least 1, or -1 to take what fits",
    ),
    Refusal(
        "ring",
        _parallel(SequenceParallelKind.RING),
        "sequence_parallel_kind=ring: a rank holds the keys and values of some tokens only, and pages hold all tokens "
        "of some heads; use tensor_parallel_size or cfg_parallel_size",
    ),
    Refusal(
        "hybrid",
        _parallel(SequenceParallelKind.HYBRID),
        "sequence_parallel_kind=hybrid: its outer ring leaves a rank with some tokens only, and pages hold all tokens "
        "of some heads; use tensor_parallel_size or cfg_parallel_size",
    ),
    Refusal(
        "all_gather",
        _parallel(SequenceParallelKind.ALL_GATHER),
        "sequence_parallel_kind=all_gather: keys and values are gathered per forward and no rank keeps them; use "
        "tensor_parallel_size or cfg_parallel_size",
    ),
    Refusal(
        "ulysses_uneven",
        _parallel(SequenceParallelKind.ULYSSES_UNEVEN),
        "sequence_parallel_kind=ulysses_uneven: ranks would hold pages of different sizes under the same ids; use "
        "tensor_parallel_size or cfg_parallel_size",
    ),
    Refusal(
        "ulysses",
        _parallel(SequenceParallelKind.ULYSSES),
        "sequence_parallel_kind=ulysses is not built; use tensor_parallel_size or cfg_parallel_size",
    ),
    Refusal(
        "sequence_parallel_size",
        lambda s: s.sequence_parallel_size != 1,
        "sequence_parallel_size={s.sequence_parallel_size}: no kind of sequence parallelism is built; set it to 1 and "
        "use tensor_parallel_size or cfg_parallel_size",
    ),
    _at_least_one("tensor_parallel_size", "the ranks that share the heads"),
    _at_least_one("cfg_parallel_size", "the ranks that share the CFG rows"),
    Refusal(
        "cfg_rows",
        lambda s: _paged(s) and s.cfg_parallel_size not in (1, s.diffusion_kv_max_rows_per_request),
        "cfg_parallel_size={s.cfg_parallel_size} with "
        "diffusion_kv_max_rows_per_request={s.diffusion_kv_max_rows_per_request}: each rank computes one row; make "
        "them equal, or set cfg_parallel_size=1",
    ),
    Refusal(
        "step_execution",
        lambda s: s.step_execution,
        "step_execution=True: a wave of requests is at one step, and only its first computes prefixes; set "
        "step_execution=False",
    ),
    Refusal(
        "continuous_batching",
        lambda s: s.continuous_batching,
        "continuous_batching=True: no request joins a wave that is under way; set continuous_batching=False",
    ),
    Refusal(
        "cache_backend",
        lambda s: s.cache_backend is not None,
        "cache_backend={s.cache_backend!r}: a cache that skips steps could skip step 0, which fills the pages; unset "
        "cache_backend",
    ),
    Refusal(
        "quantization",
        lambda s: s.quantization is not None,
        "quantization={s.quantization!r}: reuse was never shown exact on quantised weights, keys or values; unset "
        "quantization",
    ),
    Refusal(
        "enable_cpu_offload",
        lambda s: s.enable_cpu_offload,
        "enable_cpu_offload=True: nothing here moves weights between steps; set enable_cpu_offload=False",
    ),
    _at_least_one("block_size", "the tokens of a page"),
    _at_least_one("max_num_seqs", "the requests that run at once"),
    _at_least_one("max_wave_requests", "the requests that share a forward"),
    Refusal(
        "max_wave_requests_above_max_num_seqs",
        lambda s: s.max_wave_requests is not None and s.max_wave_requests > s.max_num_seqs,
        "max_wave_requests={s.max_wave_requests} is above max_num_seqs={s.max_num_seqs}; so many requests never run "
        "at once",
    ),
    Refusal(
        "span_safe_hits_without_prefix_caching",
        lambda s: s.span_safe_hits and not s.enable_prefix_caching,
        "span_safe_hits=True with enable_prefix_caching=False: nothing is ever hit; set both or neither",
    ),
)
"""In order: of several that apply, the first is told, so special combinations stand before what is not built at all."""


def check_settings(settings: DiffusionKVSettings) -> None:
    """Check settings whose types are right.

    Raises:
        DiffusionKVConfigError: the first refusal that applies.
    """
    for refusal in REFUSALS:
        if refusal.applies(settings):
            raise DiffusionKVConfigError(refusal.text(settings))
