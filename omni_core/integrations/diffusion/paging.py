# SPDX-License-Identifier: Apache-2.0
"""The pages of a stage: as many as the memory holds, handed out by vLLM's KV manager, held by the worker."""

from __future__ import annotations

from omni_core.diffusion_kv.attention.gathered import GatheredAttention
from omni_core.diffusion_kv.attention.paged import PagedAttention
from omni_core.diffusion_kv.config import AttentionOwnerKind, DiffusionKVConfig
from omni_core.diffusion_kv.parallel import Ranks
from omni_core.diffusion_kv.pipeline import AnyPipeline
from omni_core.diffusion_kv.worker.device_memory import DeviceMemory
from omni_core.diffusion_kv.worker.kv_worker import KVWorker
from omni_core.diffusion_kv.worker.step_workers import PagedStepWorker
from omni_core.integrations.diffusion.admission import AdmissionEnvelope
from omni_core.integrations.diffusion.kv_manager import VllmKVReservations
from omni_core.integrations.diffusion.sizing import KVPool, PoolDemand, RankMemory, plan_pool


def size_pool(config: DiffusionKVConfig, pipeline: AnyPipeline, envelope: AdmissionEnvelope, rank_bytes: int) -> KVPool:
    """The pool that the smallest rank can hold.

    Raises:
        DiffusionKVConfigError: it cannot hold the largest request.
    """
    demand = PoolDemand(
        block_size=config.block_size,
        max_rows=config.max_rows,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        longest_row_tokens=envelope.max_total_tokens,
    )
    return plan_pool([RankMemory(pipeline.kv_shape, rank_bytes)], demand)


def open_reservations(config: DiffusionKVConfig, pool: KVPool) -> VllmKVReservations:
    """An empty pool in the hands of vLLM's KV manager."""
    return VllmKVReservations(
        pool,
        max_rows=config.max_rows,
        enable_prefix_caching=config.enable_prefix_caching,
        span_safe_hits=config.span_safe_hits,
    )


def open_worker(
    config: DiffusionKVConfig, pipeline: AnyPipeline, pool: KVPool, memory: DeviceMemory, ranks: Ranks
) -> PagedStepWorker:
    """The pages themselves and who attends over them. A failure leaves nothing allocated.

    Raises:
        DiffusionKVConfigError: the attention owner cannot serve this model or device.
        MemoryError: the device has not that much.
    """
    try:
        worker = KVWorker(
            pipeline.kv_shape,
            pool.num_blocks,
            pool.block_size,
            max_rows=config.max_rows,
            max_num_seqs=config.native_max_num_seqs,
            max_blocks_per_row=-(-pool.max_model_len // pool.block_size),
            memory=memory,
            cfg=ranks.cfg,
        )
        return PagedStepWorker(_owner(config, worker))
    except BaseException:
        memory.close()
        raise


def _owner(config: DiffusionKVConfig, worker: KVWorker) -> PagedAttention:
    if config.attention_owner is AttentionOwnerKind.GATHERED:
        return GatheredAttention(worker)
    # Late: it loads vLLM's compiled operations.
    from omni_core.integrations.diffusion.kernel_attention import KernelAttention

    return KernelAttention(worker)
