# SPDX-License-Identifier: Apache-2.0
"""What a stage finds out before it serves: how large its largest request is, and how much memory that leaves."""

from __future__ import annotations

import resource
from dataclasses import dataclass

import torch

from omni_core.backend.base import DeviceBackend
from omni_core.diffusion_kv.attention.owner import RowKey
from omni_core.diffusion_kv.attention.profiling import ProfilingAttention
from omni_core.diffusion_kv.config import DiffusionKVConfig
from omni_core.diffusion_kv.errors import DiffusionKVConfigError
from omni_core.diffusion_kv.gate import ModelKVFacts, RankKVFacts
from omni_core.diffusion_kv.parallel import Ranks
from omni_core.diffusion_kv.pipeline import AnyPipeline, PreparedRequest
from omni_core.integrations.diffusion.admission import AdmissionEnvelope

KV_CACHE_LAYOUT = "LBHNC"
"""Of the pages, by vLLM's name: layers, pages, heads, tokens, channels. Both owners read this one."""
_BYTES_PER_KIB = 1_024


@dataclass(frozen=True, slots=True, eq=False)
class Profile:
    """The largest request the stage accepts, laid out by the model's own preprocessing."""

    prepared: PreparedRequest
    envelope: AdmissionEnvelope


def profile_request(pipeline: AnyPipeline) -> Profile:
    """Lay out the largest request.

    Raises:
        DiffusionKVConfigError: the pipeline refuses its own profile request.
    """
    try:
        prepared = pipeline.preprocess(pipeline.profile_request())
    except ValueError as error:
        raise DiffusionKVConfigError(
            f"the largest request of {pipeline.architecture!r} cannot be laid out: {error}"
        ) from error
    return Profile(prepared, AdmissionEnvelope.of(prepared))


def run_profile(pipeline: AnyPipeline, profile: Profile, ranks: Ranks) -> torch.device:
    """Run the largest request's first and second step with pages disabled.

    Returns:
        Where the model computes.
    """
    state = pipeline.start(profile.prepared)
    device: torch.device = state.latents.device
    request = profile.prepared.request
    rows = (ranks.cfg.rank,) if ranks.cfg.size > 1 else range(len(profile.prepared.rows))
    keys = tuple(RowKey(request.request_id, row) for row in rows)
    layout = profile.prepared.rows[0].layout
    owner = ProfilingAttention(pipeline.kv_shape, device)
    pipeline.denoise([state], 0, owner.first_step(keys, layout))
    if request.num_inference_steps > 1:
        pipeline.denoise([state], 1, owner.later_step(keys, layout))
    return device


def peak_host_bytes() -> int:
    """The most memory this process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _BYTES_PER_KIB


def check_parallel_sizes(config: DiffusionKVConfig, ranks: Ranks) -> None:
    """See that the ranks are those the configuration names.

    Raises:
        DiffusionKVConfigError: another number of ranks.
    """
    for name, wanted, found in (
        ("tensor_parallel_size", config.tensor_parallel_size, ranks.tensor.size),
        ("cfg_parallel_size", config.cfg_parallel_size, ranks.cfg.size),
    ):
        if wanted != found:
            raise DiffusionKVConfigError(
                f"{name}={wanted}, and this process was opened as one of {found}; start as many processes as the "
                "deploy file says, each with its Ranks"
            )


def model_facts(config: DiffusionKVConfig, pipeline: AnyPipeline, profile: Profile, ranks: Ranks) -> ModelKVFacts:
    """What the gate asks of a paged stage's model."""
    shape, envelope = pipeline.kv_shape, profile.envelope
    return ModelKVFacts(
        architecture=pipeline.architecture,
        num_query_heads=shape.num_query_heads * ranks.tensor.size,
        num_kv_heads=shape.num_kv_heads * ranks.tensor.size,
        ranks=tuple(RankKVFacts.of(rank, shape) for rank in range(ranks.tensor.size * ranks.cfg.size)),
        profile_rows=envelope.max_rows,
        profile_total_tokens=envelope.max_total_tokens,
        max_model_len=envelope.max_total_tokens,
        kv_cache_layouts=((f"attention_owner={config.attention_owner}", KV_CACHE_LAYOUT),),
        native_max_num_seqs=config.native_max_num_seqs,
    )


def available_bytes(config: DiffusionKVConfig, backend: DeviceBackend, transient_bytes: int) -> int:
    """What this rank has for pages: as set, or its share of the device less what is used and what a forward takes.

    Args:
        config: the stage's.
        backend: of the device; asked after the profile has run.
        transient_bytes: taken during a forward and given back, as far as the device does not count it as used.
    """
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes
    device = backend.device_info()
    used = device.total_memory_bytes - device.free_memory_bytes
    return max(0, int(device.total_memory_bytes * config.gpu_memory_utilization) - used - transient_bytes)


def smallest_of_all_ranks(value: int, ranks: Ranks) -> int:
    """The least of every rank's value; blocks until all ranks have called it."""
    for group in (ranks.tensor, ranks.cfg):
        if group.size > 1:
            value = min(int(each.item()) for each in group.all_gather(torch.tensor([value], dtype=torch.int64)))
    return value
