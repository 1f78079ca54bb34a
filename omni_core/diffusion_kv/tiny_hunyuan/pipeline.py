# SPDX-License-Identifier: Apache-2.0
"""tiny-hunyuan as the engine loop runs it: dense, paged, or paged with prefix caching, on one or several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import numpy as np
import torch

from omni_core.diffusion_kv.attention.owner import KVShape, StepAttention
from omni_core.diffusion_kv.errors import DiffusionKVConfigError, DiffusionKVError
from omni_core.diffusion_kv.parallel import Ranks
from omni_core.diffusion_kv.pipeline import DiffusionRequest, Pixels
from omni_core.diffusion_kv.tiny_hunyuan.encoders import ReferenceEncoder, TinyEncoders, latent_noise
from omni_core.diffusion_kv.tiny_hunyuan.flow_matching import euler_step, noise_levels
from omni_core.diffusion_kv.tiny_hunyuan.forward import checked_wave, query_window
from omni_core.diffusion_kv.tiny_hunyuan.layouts import PATCH_PIXELS
from omni_core.diffusion_kv.tiny_hunyuan.lora import AdapterStore
from omni_core.diffusion_kv.tiny_hunyuan.model import TinyTransformer
from omni_core.diffusion_kv.tiny_hunyuan.options import TinyHunyuanOptions
from omni_core.diffusion_kv.tiny_hunyuan.patch_codec import PatchCodec
from omni_core.diffusion_kv.tiny_hunyuan.pictures import to_pixels
from omni_core.diffusion_kv.tiny_hunyuan.preprocessing import prepare
from omni_core.diffusion_kv.tiny_hunyuan.rope import Rotary, row_rotary
from omni_core.diffusion_kv.tiny_hunyuan.state import TinyHunyuanRequest, TinyHunyuanState
from omni_core.diffusion_kv.tiny_hunyuan.weights import WeightSource

ARCHITECTURE = "tiny-hunyuan"
"""The name a deploy file and the model hook use."""
_ALONE = Ranks()


class TinyHunyuanPipeline:
    """A `DiffusionPipeline` with random weights. Two of equal options are equal bit for bit on the same ranks."""

    def __init__(
        self, options: TinyHunyuanOptions, ranks: Ranks = _ALONE, encoders: ReferenceEncoder | None = None
    ) -> None:
        """Draw the weights.

        Args:
            options: which tiny-hunyuan.
            ranks: this process's place; heads and MLP must divide by the tensor-parallel ranks.
            encoders: what encodes the references in the model's place, for tests; `None`: the model's own.

        Raises:
            DiffusionKVConfigError: the model does not divide by the ranks.
        """
        size = options.transformer
        _check_ranks(ranks, options)
        device = torch.device(options.device)
        self._options = options
        self._ranks = ranks
        source = WeightSource(options.weight_seed, options.torch_dtype, device)
        self._codec = PatchCodec(options.latent_dtype, device)
        own_encoders = TinyEncoders(size, self._codec, options.slots.vit_grid, source)
        self._encoders: ReferenceEncoder = own_encoders if encoders is None else encoders
        self._transformer = TinyTransformer(size, ranks.tensor, source)
        self._adapters = AdapterStore(size, options.torch_dtype, device)
        self._rotaries = tuple(
            row_rotary(
                options.slots, count, options.prefix_tokens_with(count), size.head_size, options.latent_dtype, device
            )
            for count in range(options.slots.max_references + 1)
        )

    @property
    def options(self) -> TinyHunyuanOptions:
        """What it was made from."""
        return self._options

    @property
    def architecture(self) -> str:
        return ARCHITECTURE

    @property
    def kv_shape(self) -> KVShape:
        size, ranks = self._options.transformer, self._ranks.tensor.size
        return KVShape(
            num_layers=size.num_layers,
            num_query_heads=size.num_query_heads // ranks,
            num_kv_heads=size.num_kv_heads // ranks,
            head_size=size.head_size,
            dtype=self._options.torch_dtype,
        )

    def profile_request(self) -> DiffusionRequest:
        grid = self._options.slots.vae_grid
        grey = np.full((grid.height * PATCH_PIXELS, grid.width * PATCH_PIXELS, 3), 128, dtype=np.uint8)
        return DiffusionRequest(
            request_id="profile",
            prompt="",
            references=(grey,) * self._options.slots.max_references,
            seed=0,
            guidance_scale=2.5,
            num_inference_steps=2,
        )

    def preprocess(self, request: DiffusionRequest) -> TinyHunyuanRequest:
        return prepare(request, self._options, cfg_ranks=self._ranks.cfg.size)

    def start(self, prepared: TinyHunyuanRequest) -> TinyHunyuanState:
        """Encode the references, then draw the first noise, all from one generator of the request's seed.

        Raises:
            RequestRefusedError: the adapter's file is gone or changed since `preprocess`.
        """
        request, slots = prepared.request, self._options.slots
        adapter = None if request.lora is None else self._adapters.adapter(request.request_id, request.lora)
        generator = torch.Generator().manual_seed(prepared.seed)
        began = perf_counter()
        encoded = [self._encoders.encode(reference, generator) for reference in prepared.references]
        encoder_s = perf_counter() - began
        embeddings = self._transformer.embed([row.token_ids for row in prepared.rows])
        for start, reference in zip(slots.reference_starts(len(encoded)), encoded, strict=True):
            separator = start + slots.vae_grid.tokens
            embeddings[:, start:separator] = reference.vae_tokens
            embeddings[:, separator + 1 : start + slots.reference_tokens] = reference.vit_tokens
        noise = latent_noise(slots.target_grid, generator)
        return TinyHunyuanState(
            prepared=prepared,
            latents=noise.to(device=embeddings.device, dtype=self._options.latent_dtype),
            embeddings=embeddings,
            sigmas=noise_levels(request.num_inference_steps, float(self._options.timestep_shift)),
            adapter=adapter,
            encoder_s=encoder_s,
        )

    def denoise(self, states: Sequence[TinyHunyuanState], step_index: int, attention: StepAttention) -> None:
        """Advance every state by one step; a raise leaves all of them as they were.

        Raises:
            DiffusionKVError: states that do not belong in one forward, or not at this step.
            PagedAttentionError: the attention's rows or query tokens are not this forward's, or the layers refused.
        """
        wave = checked_wave(states, step_index, attention, self._ranks.cfg)
        window = query_window(wave.layout.geometry, self._rotary_of(states[0]), step_index, attention)
        start = attention.query_start_tokens
        velocity = self._transformer.predict_velocity(
            wave.row_embeddings(start, start + attention.num_query_tokens),
            wave.row_latents(),
            states[0].sigmas[step_index],
            window,
            states[0].adapter,
            attention,
        )
        for state, of_state in zip(states, wave.guided_velocities(velocity, self._ranks.cfg), strict=True):
            levels = state.sigmas[step_index : step_index + 2]
            state.latents = euler_step(state.latents, of_state, *levels)
            state.next_step_index = step_index + 1

    def decode(self, state: TinyHunyuanState) -> Pixels:
        """The finished picture.

        Raises:
            DiffusionKVError: steps are left.
        """
        if not state.finished:
            raise DiffusionKVError(
                f"request {state.prepared.request.request_id!r}: {state.next_step_index} of {len(state.sigmas) - 1} "
                "steps are done; only a finished picture is decoded"
            )
        return to_pixels(self._codec.decode(state.latents))

    def _rotary_of(self, state: TinyHunyuanState) -> Rotary:
        return self._rotaries[len(state.prepared.references)]


def _check_ranks(ranks: Ranks, options: TinyHunyuanOptions) -> None:
    size = options.transformer
    for name, width in (
        ("num_query_heads", size.num_query_heads),
        ("num_kv_heads", size.num_kv_heads),
        ("mlp_dim", size.mlp_dim),
    ):
        if width % ranks.tensor.size:
            raise DiffusionKVConfigError(
                f"tiny-hunyuan: {name}={width} of layout {options.layout!r} does not divide by {ranks.tensor.size} "
                "tensor-parallel ranks"
            )
    if ranks.cfg.size not in (1, 2):
        raise DiffusionKVConfigError(f"tiny-hunyuan: {ranks.cfg.size} CFG-parallel ranks; it has 2 CFG rows")
