# SPDX-License-Identifier: Apache-2.0
"""Settings of engines and answers about them, in the forms that our rules and the cut code have."""

from types import SimpleNamespace

from graph_batches import MAX_TOKENS

from omni_core.backend.graph_padding import (
    VLLM_0_32,
    CaptureMode,
    CaptureSettings,
    GraphConfig,
    GraphMode,
    Microbatches,
    PaddedBatch,
    captured_sizes,
    rounded_for_decodes,
)

COUNTS = range(1, MAX_TOKENS + 1)
ALL_KINDS = {"all_kinds_up_to": 3072}
"""No graph is larger."""
USER_SIZES = (1, 3, 7, 60, 61, 120, 500, 1000, 3000)


def graph_config(mode, query_len, max_num_seqs, sizes, lora=None):
    chosen = captured_sizes(
        CaptureSettings(max_num_seqs=max_num_seqs, max_num_batched_tokens=4096, query_len=query_len, sizes=sizes),
        VLLM_0_32,
    )
    return GraphConfig(
        capture_sizes=chosen,
        capture_mode=mode,
        max_num_seqs=max_num_seqs,
        query_len=query_len,
        **({} if lora is None else {"lora": lora}),
    )


def v1_config(mode, query_len, max_num_seqs, sizes, lora=None):
    config = graph_config(mode, query_len, max_num_seqs, sizes, lora)
    if mode.decode is not GraphMode.FULL:
        return config
    return GraphConfig(
        capture_sizes=rounded_for_decodes(config.capture_sizes, query_len),
        capture_mode=mode,
        max_num_seqs=max_num_seqs,
        query_len=query_len,
        lora=config.lora,
    )


def answer(padded: PaddedBatch):
    return padded.mode.value, padded.num_tokens, padded.num_reqs, padded.num_ubatches


def their_answer(mode, descriptor, num_ubatches=1):
    num_reqs = descriptor.num_reqs if mode.name == "FULL" else None
    return mode.value, descriptor.num_tokens, num_reqs, num_ubatches


SPLITS = [
    Microbatches(num_ubatches=1),
    Microbatches(num_ubatches=2, decode_threshold_tokens=32, prefill_threshold_tokens=128),
    Microbatches(num_ubatches=3, decode_threshold_tokens=8, prefill_threshold_tokens=8),
]


def parallel_config(microbatches, num_ranks, rank):
    return SimpleNamespace(
        data_parallel_size=num_ranks,
        data_parallel_rank=rank,
        tensor_parallel_size=1,
        disable_nccl_for_dp_synchronization=True,
        use_ubatching=microbatches.num_ubatches > 1,
        num_ubatches=microbatches.num_ubatches,
        dbo_decode_token_threshold=microbatches.decode_threshold_tokens,
        dbo_prefill_token_threshold=microbatches.prefill_threshold_tokens,
    )


def bound(call, rank, batch):
    return lambda: call(rank, batch)


RANK_MODES = (CaptureMode.FULL_AND_PIECEWISE, CaptureMode.FULL, CaptureMode.FULL_DECODE_ONLY)

MAX_LORAS = 5
