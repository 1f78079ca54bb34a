# SPDX-License-Identifier: Apache-2.0
"""A request of tiny-hunyuan before and while it runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from omni_core.diffusion_kv.pipeline import DiffusionRequest, PreparedRow
from omni_core.diffusion_kv.tiny_hunyuan.lora import Adapter


@dataclass(frozen=True, slots=True, eq=False)
class ProcessedReference:
    """A reference picture as the encoders take it: cropped, resized, in [-1, 1]."""

    vae_pixels: torch.Tensor
    """float32 `[3, height, width]`."""
    vit_pixels: torch.Tensor
    """float32 `[3, height, width]`."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class TinyHunyuanRequest:
    """A request after preprocessing. Plain data: it may cross to another process."""

    request: DiffusionRequest
    rows: tuple[PreparedRow, ...]
    """Conditional, then unconditional; the second is missing at guidance scale 1.0."""
    references: tuple[ProcessedReference, ...]
    seed: int
    """The request's, or one drawn for it, so that every rank draws alike."""


@dataclass(slots=True, eq=False)
class TinyHunyuanState:
    """A request between denoise steps. The engine's one thread reads it; the pipeline alone changes it."""

    prepared: TinyHunyuanRequest
    latents: torch.Tensor
    """`[channels, height, width]` of the target, in `TinyHunyuanOptions.latent_dtype`; replaced by each step."""
    embeddings: torch.Tensor
    """`[rows, total_tokens, dim]`: whole rows, references included; each step fills the target's places."""
    sigmas: tuple[float, ...]
    """Noise level before each step and after the last."""
    adapter: Adapter | None
    encoder_s: float
    """Seconds spent in the VAE and ViT encoders."""
    next_step_index: int = 0

    @property
    def finished(self) -> bool:
        """Whether every step is done and the picture can be decoded."""
        return self.next_step_index == len(self.sigmas) - 1
