# SPDX-License-Identifier: Apache-2.0
"""A paged stage under watch: pages of vLLM or on paper, a worker with its gathered attention, the model."""

from dataclasses import dataclass

import torch
from diffusion_kv.fuzz.page_books import WatchedReservations
from diffusion_kv.fuzz.paper_pages import PaperPages
from diffusion_kv.fuzz.small_model import Ask, BreakableModel, truth_of
from diffusion_kv.native_pages import import_native
from diffusion_kv.worker_rig import CPU
from hypothesis import strategies as st

from omni_core.diffusion_kv.attention.gathered import GatheredAttention
from omni_core.diffusion_kv.hooks import RowIdentifier
from omni_core.diffusion_kv.tiny_hunyuan.hook import TinyHunyuanHook
from omni_core.diffusion_kv.worker.device_memory import BackendMemory
from omni_core.diffusion_kv.worker.kv_worker import KVWorker
from omni_core.diffusion_kv.worker.step_workers import PagedStepWorker
from omni_core.integrations.diffusion.admission import AdmissionEnvelope
from omni_core.runtime import ThreadingRuntime

MAX_ROWS = 2
LONGEST_ROW = 120
RESULT_TOLERANCE = 1e-8

asks = st.builds(
    Ask,
    prompt=st.sampled_from(("a fox", "a fox", "a fix", "b fox", "")),
    pictures=st.sampled_from(("", "p", "pq", "pq", "pr", "pr", "qr", "rr")),
    seed=st.sampled_from((1, 1, 1, 1, 2, None)),
    guidance_scale=st.sampled_from((2.5, 2.5, 1.0)),
    num_inference_steps=st.sampled_from((1, 2, 2, 3)),
    lora_scale=st.sampled_from((None, None, None, None, 1.0, 1.0, 0.5)),
)


@dataclass(frozen=True, slots=True)
class Sizes:
    """What differs between stages."""

    prefix_tokens: int | None
    """Of every row; `None`: 32, 58 or 91, by the number of pictures."""
    shared_head_tokens: int
    """How far the two rows of a request are alike."""
    block_size: int
    pool_tokens: int
    max_running: int
    max_wave: int
    twins_wait: bool
    span_safe: bool = False

    @property
    def layout(self):
        return self.prefix_tokens, self.shared_head_tokens

    @property
    def usable_pages(self):
        return self.pool_tokens // self.block_size


def stage_sizes(*, span_safe):
    """Prefixes on, before and after the edge of a page; pools in which the largest request never fits, or fits once."""
    return st.builds(
        Sizes,
        prefix_tokens=st.sampled_from((None, None, 95, 96, 97)),
        shared_head_tokens=st.sampled_from((0, 40, 40, 1_000)),
        block_size=st.sampled_from((16, 16, 8, 32)),
        pool_tokens=st.sampled_from((208, 240, 288, 416, 640)),
        max_running=st.integers(1, 4),
        max_wave=st.integers(1, 3),
        twins_wait=st.booleans(),
        span_safe=span_safe,
    )


def paper_pages(sizes):
    return PaperPages(sizes.usable_pages, sizes.block_size)


def vllm_pages(sizes):
    native = import_native()
    demand = native.sizing.PoolDemand(
        block_size=sizes.block_size,
        max_rows=MAX_ROWS,
        max_num_seqs=sizes.max_running,
        max_model_len=LONGEST_ROW,
        num_blocks=sizes.usable_pages + 1,
    )
    pool = native.sizing.plan_pool([native.sizing.RankMemory(BreakableModel(sizes.layout).kv_shape, 1)], demand)
    return native.kv_manager.VllmKVReservations(
        pool, max_rows=MAX_ROWS, enable_prefix_caching=True, span_safe_hits=sizes.span_safe
    )


class Stage:
    """Everything below an engine. `close` it."""

    def __init__(self, sizes, make_pages, backend):
        self.sizes = sizes
        self.model = BreakableModel(sizes.layout)
        worker = KVWorker(
            self.model.kv_shape,
            sizes.usable_pages + 1,
            sizes.block_size,
            max_rows=MAX_ROWS,
            max_num_seqs=sizes.max_running * MAX_ROWS,
            max_blocks_per_row=-(-LONGEST_ROW // sizes.block_size),
            memory=BackendMemory(backend, CPU),
        )
        self.step_worker = PagedStepWorker(GatheredAttention(worker))
        self.pages = WatchedReservations(make_pages(sizes), worker, self.model, sizes.span_safe)
        self.pages.fill_with_nan(range(1, sizes.usable_pages + 1))
        profile = self.model.preprocess(self.model.profile_request())
        self.envelope = AdmissionEnvelope.of(profile)
        first_model = self.model.first_model
        self.identifier = RowIdentifier(TinyHunyuanHook(first_model), ThreadingRuntime())

    @property
    def kv_worker(self):
        return self.step_worker.kv_worker

    def change_weights(self):
        self.model.weight_seed += 1

    def check_result(self, prepared, weight_seed, latents):
        """A request's latents are those it has alone."""
        truth = truth_of(prepared, self.sizes.layout, weight_seed).latents
        error = float((latents - truth).norm() / truth.norm())
        assert error <= RESULT_TOLERANCE, f"request {prepared.request.request_id!r} differs by {error:.1e}"
        assert bool(torch.isfinite(latents).all())

    def close(self):
        self.step_worker.close()
