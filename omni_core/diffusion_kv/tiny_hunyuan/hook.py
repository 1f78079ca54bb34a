# SPDX-License-Identifier: Apache-2.0
"""What identifies the rows of tiny-hunyuan. Its prefix sees neither target nor timestep, so it may have a hook."""

from __future__ import annotations

from omni_core.diffusion_kv.hooks import IdentityContext
from omni_core.diffusion_kv.identity.images import (
    Draw,
    LatentDraws,
    ReferenceImage,
    SeededDraws,
    UnrepeatableDraws,
    image_digests,
    place,
)
from omni_core.diffusion_kv.identity.namespace import ModelIdentity
from omni_core.diffusion_kv.rows import RowIdentity
from omni_core.diffusion_kv.tiny_hunyuan.options import TinyHunyuanOptions
from omni_core.diffusion_kv.tiny_hunyuan.patch_codec import LATENT_CHANNELS
from omni_core.diffusion_kv.tiny_hunyuan.pipeline import ARCHITECTURE, TinyHunyuanPipeline
from omni_core.diffusion_kv.tiny_hunyuan.state import ProcessedReference, TinyHunyuanRequest

LAYOUT_VERSION = 1
"""Grows with every change of the tokenizer, the layouts or the positions."""
_GENERATOR_DEVICE = "cpu"
"""Every request draws on the CPU, whatever the model computes on."""


class TinyHunyuanHook:
    """A `ModelHook`. Any thread calls."""

    def __init__(self, pipeline: TinyHunyuanPipeline) -> None:
        """Identify requests of this pipeline."""
        self._options = pipeline.options
        self._model = _model_identity(pipeline.options)

    @property
    def architecture(self) -> str:
        return ARCHITECTURE

    def identify(self, prepared: TinyHunyuanRequest, context: IdentityContext) -> tuple[RowIdentity, ...]:
        """One identity per row; both CFG rows have the same pictures at the same tokens.

        Raises:
            IdentityValueError: something of the request has no canonical hash.
        """
        slots = self._options.slots
        digests = image_digests(
            [self._reference(reference) for reference in prepared.references], _draws(prepared, context)
        )
        starts = slots.reference_starts(len(digests))
        features = tuple(
            place(digest, start, start + slots.reference_tokens) for digest, start in zip(digests, starts, strict=True)
        )
        namespace = context.namespace(self._model)
        return tuple(RowIdentity(row.token_ids, features, namespace) for row in prepared.rows)

    def _reference(self, reference: ProcessedReference) -> ReferenceImage:
        vae, vit = self._options.slots.vae_grid, self._options.slots.vit_grid
        return ReferenceImage(
            tensors={"vae": reference.vae_pixels, "vit": reference.vit_pixels},
            grids={"vae": (vae.height, vae.width), "vit": (vit.height, vit.width)},
            draw=Draw((LATENT_CHANNELS, vae.height, vae.width), "float32"),
        )


def _draws(prepared: TinyHunyuanRequest, context: IdentityContext) -> LatentDraws:
    if prepared.request.seed is None:
        return UnrepeatableDraws(context.unique_value)
    return SeededDraws(prepared.seed, _GENERATOR_DEVICE)


def _model_identity(options: TinyHunyuanOptions) -> ModelIdentity:
    return ModelIdentity(
        architecture=ARCHITECTURE,
        path="weights drawn from a seed",
        revision=None,
        dtype=options.dtype,
        layout_version=LAYOUT_VERSION,
        options={
            "layout": options.layout,
            "prefix_tokens": options.prefix_tokens,
            "num_layers": options.transformer.num_layers,
            "weight_seed": options.weight_seed,
            "device": options.device,
        },
    )
