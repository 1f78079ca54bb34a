# SPDX-License-Identifier: Apache-2.0
"""Encoders that are skipped once a picture was encoded twice: its pages are full by then, and nobody reads theirs."""

import torch

from omni_core.diffusion_kv.tiny_hunyuan import TinyHunyuanPipeline
from omni_core.diffusion_kv.tiny_hunyuan.encoders import EncodedReference, TinyEncoders, latent_noise
from omni_core.diffusion_kv.tiny_hunyuan.patch_codec import PatchCodec
from omni_core.diffusion_kv.tiny_hunyuan.weights import WeightSource

ENCODED_TIMES = 3
"""The profile's grey picture, then a miss, then a hit."""


class EncodersThatSkip:
    """A model's own encoders at first; later zeros, with or without the draw they owe."""

    def __init__(self, options, *, draws):
        device = torch.device(options.device)
        source = WeightSource(options.weight_seed, options.torch_dtype, device)
        codec = PatchCodec(options.latent_dtype, device)
        self.own = TinyEncoders(options.transformer, codec, options.slots.vit_grid, source)
        self.options, self.draws, self.times = options, draws, 0

    @classmethod
    def pipeline(cls, *, draws):
        """Makes the pipeline of given options."""
        return lambda options: TinyHunyuanPipeline(options, encoders=cls(options, draws=draws))

    def encode(self, reference, generator):
        self.times += 1
        if self.times <= ENCODED_TIMES:
            return self.own.encode(reference, generator)
        if self.draws:
            latent_noise(self.options.slots.vae_grid, generator)
        dim = self.options.transformer.dim
        return EncodedReference(
            vae_tokens=torch.zeros(self.options.slots.vae_grid.tokens, dim),
            vit_tokens=torch.zeros(self.options.slots.vit_grid.tokens, dim),
        )
