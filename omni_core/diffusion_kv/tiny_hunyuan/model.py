# SPDX-License-Identifier: Apache-2.0
"""All weights of the transformer: embeddings, timestep, layers, and the head that predicts the picture."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.nn import functional

from omni_core.diffusion_kv.attention.owner import StepAttention
from omni_core.diffusion_kv.parallel import RankGroup
from omni_core.diffusion_kv.tiny_hunyuan.layouts import TransformerSize
from omni_core.diffusion_kv.tiny_hunyuan.lora import Adapter
from omni_core.diffusion_kv.tiny_hunyuan.patch_codec import LATENT_CHANNELS
from omni_core.diffusion_kv.tiny_hunyuan.tokenizer import VOCABULARY_SIZE
from omni_core.diffusion_kv.tiny_hunyuan.transformer import QueryWindow, TransformerLayer
from omni_core.diffusion_kv.tiny_hunyuan.weights import WeightSource, rms_norm

_TIMESTEP_FREQUENCIES = 64
_TIMESTEPS = 1_000.0
"""The timestep of noise level 1."""
_CLEAN_GAIN = 0.6
"""Of the predicted picture's latents before smoothing, which takes some of it away."""


class TinyTransformer:
    """The diffusion transformer on this rank."""

    def __init__(self, size: TransformerSize, ranks: RankGroup, source: WeightSource) -> None:
        """Draw the weights from `source`."""
        self._token_embeddings = source.normal((VOCABULARY_SIZE, size.dim), std=1.0)
        self._latent_in = source.matrix(LATENT_CHANNELS, size.dim)
        self._timestep_in = source.matrix(2 * _TIMESTEP_FREQUENCIES, size.dim, gain=2.0)
        self._timestep_out = source.matrix(size.dim, size.dim, gain=2.0)
        self._modulation = source.matrix(size.dim, 6 * size.dim, gain=0.2)
        self._layers = tuple(TransformerLayer(index, size, ranks, source) for index in range(size.num_layers))
        self._latent_out = source.matrix(size.dim, LATENT_CHANNELS, gain=_CLEAN_GAIN)

    def embed(self, token_ids: Sequence[Sequence[int]]) -> torch.Tensor:
        """Rows of ids to `[rows, tokens, dim]`."""
        ids = torch.tensor(token_ids, dtype=torch.int64, device=self._token_embeddings.device)
        return functional.embedding(ids, self._token_embeddings)

    def predict_velocity(
        self,
        embeddings: torch.Tensor,
        latents: torch.Tensor,
        noise_level: float,
        window: QueryWindow,
        adapter: Adapter | None,
        attention: StepAttention,
    ) -> torch.Tensor:
        """One forward.

        Args:
            embeddings: `[rows, tokens, dim]` of the window's tokens; the target's places are overwritten.
            latents: `[rows, channels, height, width]`.
            noise_level: the same for every row; above 0.
            window: which tokens these are.
            adapter: of all rows, or none.
            attention: the step's.

        Returns:
            Velocity, shaped and typed like `latents`.
        """
        timestep = self._embed_timestep(noise_level)
        image = slice(window.target.start + 1, window.target.stop)
        embeddings[:, window.target.start] = timestep
        embeddings[:, image] = functional.linear(latents.flatten(2).mT.to(embeddings), self._latent_in)
        modulation = functional.linear(rms_norm(functional.silu(timestep)), self._modulation).view(6, -1)
        hidden = embeddings
        for layer in self._layers:
            hidden = layer.forward(hidden, window, modulation, adapter, attention)
        patches = functional.linear(rms_norm(hidden[:, image]), self._latent_out)
        clean = _smoothed(patches.mT.reshape(latents.shape).to(latents))
        return (latents - clean) / noise_level

    def _embed_timestep(self, noise_level: float) -> torch.Tensor:
        """`[dim]`."""
        exponents = torch.arange(_TIMESTEP_FREQUENCIES, dtype=torch.float64) / _TIMESTEP_FREQUENCIES
        angles = noise_level * _TIMESTEPS * torch.exp(-math.log(10_000.0) * exponents)
        waves = torch.cat((angles.cos(), angles.sin())).to(self._timestep_in)
        return functional.linear(functional.silu(functional.linear(waves, self._timestep_in)), self._timestep_out)


def _smoothed(latents: torch.Tensor) -> torch.Tensor:
    """Each patch, mixed with its neighbours: the part of the U-Net that turns tokens into a picture. Fixed weights."""
    channels = latents.shape[1]
    line = latents.new_tensor((0.25, 0.5, 0.25))
    kernel = (line[:, None] * line).expand(channels, 1, 3, 3)
    framed = functional.pad(latents, (1, 1, 1, 1), mode="replicate")
    return functional.conv2d(framed, kernel, groups=channels)
