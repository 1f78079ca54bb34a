# SPDX-License-Identifier: Apache-2.0
"""Reference pictures to embeddings: a VAE whose latent is sampled, and a ViT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

from omni_core.diffusion_kv.tiny_hunyuan.layouts import PATCH_PIXELS, Grid, TransformerSize
from omni_core.diffusion_kv.tiny_hunyuan.patch_codec import LATENT_CHANNELS, PatchCodec
from omni_core.diffusion_kv.tiny_hunyuan.state import ProcessedReference
from omni_core.diffusion_kv.tiny_hunyuan.weights import WeightSource, rms_norm

_SAMPLE_STD = 0.2
"""Of the VAE's latent around its mean."""
_VIT_HEAD_SIZE = 32


@dataclass(frozen=True, slots=True, eq=False)
class EncodedReference:
    """The embeddings of one reference, without its separator."""

    vae_tokens: torch.Tensor
    """`[VAE tokens, dim]`."""
    vit_tokens: torch.Tensor
    """`[ViT tokens, dim]`."""


class ReferenceEncoder(Protocol):
    """What turns a reference into embeddings."""

    def encode(self, reference: ProcessedReference, generator: torch.Generator) -> EncodedReference:
        """Encode one picture; draws `latent_noise` once from the request's generator."""
        ...


def latent_noise(grid: Grid, generator: torch.Generator) -> torch.Tensor:
    """One draw of `[LATENT_CHANNELS, height, width]`: float32 on the CPU whatever the model computes in."""
    return torch.randn((LATENT_CHANNELS, grid.height, grid.width), generator=generator, dtype=torch.float32)


class TinyEncoders:
    """The model's VAE and ViT. The worker's thread calls."""

    def __init__(self, size: TransformerSize, codec: PatchCodec, vit_grid: Grid, source: WeightSource) -> None:
        """Draw the weights from `source`."""
        self._codec = codec
        self._latent_projection = source.matrix(LATENT_CHANNELS, size.dim)
        self._vit = _VisionTransformer(size, vit_grid, source)

    def encode(self, reference: ProcessedReference, generator: torch.Generator) -> EncodedReference:
        mean = self._codec.encode(reference.vae_pixels)
        noise = latent_noise(Grid(mean.shape[1], mean.shape[2]), generator)
        latents = mean + _SAMPLE_STD * noise.to(mean)
        tokens = latents.flatten(1).T.to(self._latent_projection)
        return EncodedReference(
            vae_tokens=functional.linear(tokens, self._latent_projection),
            vit_tokens=self._vit.encode(reference.vit_pixels),
        )


class _VisionTransformer:
    """Patch embedding and one block."""

    def __init__(self, size: TransformerSize, grid: Grid, source: WeightSource) -> None:
        width = size.vit_dim
        self._num_heads = width // _VIT_HEAD_SIZE
        self._patches = source.normal((width, 3, PATCH_PIXELS, PATCH_PIXELS), std=4.0 * (3 * PATCH_PIXELS**2) ** -0.5)
        self._places = source.normal((grid.tokens, width), std=0.5)
        self._qkv = source.matrix(width, 3 * width)
        self._out = source.matrix(width, width)
        self._up = source.matrix(width, 2 * width)
        self._down = source.matrix(2 * width, width)
        self._projection = source.matrix(width, size.dim)

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """`[3, height, width]` to `[tokens, dim]`."""
        patches = functional.conv2d(pixels.to(self._patches)[None], self._patches, stride=PATCH_PIXELS)[0]
        hidden = patches.flatten(1).T + self._places
        projected = functional.linear(rms_norm(hidden), self._qkv)
        query, key, value = projected.view(-1, 3, self._num_heads, _VIT_HEAD_SIZE).unbind(1)
        seen = functional.scaled_dot_product_attention(
            query.transpose(0, 1)[None], key.transpose(0, 1)[None], value.transpose(0, 1)[None]
        )
        hidden = hidden + functional.linear(seen[0].transpose(0, 1).flatten(1), self._out)
        hidden = hidden + functional.linear(functional.silu(functional.linear(rms_norm(hidden), self._up)), self._down)
        return functional.linear(rms_norm(hidden), self._projection)
