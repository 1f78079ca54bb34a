# SPDX-License-Identifier: Apache-2.0
"""Model hooks with one fault each: what a wrong identity looks like."""

from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import torch

from omni_core.diffusion_kv.hooks import RowIdentifier
from omni_core.diffusion_kv.identity.canonical import canonical_digest
from omni_core.diffusion_kv.rows import ImageFeature, RowIdentity
from omni_core.diffusion_kv.tiny_hunyuan.hook import TinyHunyuanHook
from omni_core.integrations.diffusion import assembly

BLOCK = 32
PATCH = 16


class NoFault:
    """tiny-hunyuan's own hook."""

    architecture = "tiny-hunyuan"

    def __init__(self, pipeline):
        self.hook = TinyHunyuanHook(pipeline)
        self.slots = pipeline.options.slots

    def identify(self, prepared, context):
        return self.hook.identify(prepared, context)


class NoSeed(NoFault):
    """The generator is left out."""

    def identify(self, prepared, context):
        return self.hook.identify(replace(prepared, seed=0), context)


class NoContent(NoFault):
    """The pictures' content is left out; their place and size stay."""

    def identify(self, prepared, context):
        blank = [
            replace(one, vae_pixels=torch.zeros_like(one.vae_pixels), vit_pixels=torch.zeros_like(one.vit_pixels))
            for one in prepared.references
        ]
        return self.hook.identify(replace(prepared, references=tuple(blank)), context)


class BlockLocal(NoFault):
    """A page is identified by the patches behind its own tokens, not by the whole picture."""

    def identify(self, prepared, context):
        (start,) = self.slots.reference_starts(1)
        patches = [patch_of(prepared.references[0].vae_pixels, index) for index in range(self.slots.vae_grid.tokens)]
        patches.append(torch.zeros(1))  # the separator
        patches += [patch_of(prepared.references[0].vit_pixels, index) for index in range(self.slots.vit_grid.tokens)]
        end = start + len(patches)
        edges = [start, *range(start // BLOCK * BLOCK + BLOCK, end, BLOCK), end]
        features = tuple(
            ImageFeature(canonical_digest("local", [prepared.seed, *patches[a - start : b - start]]).hex(), a, b)
            for a, b in pairwise(edges)
        )
        whole = self.hook.identify(prepared, context)
        return tuple(RowIdentity(one.token_ids, features, one.namespace) for one in whole)


def patch_of(pixels, index):
    """The square of pixels behind one token."""
    row, column = divmod(index, pixels.shape[2] // PATCH)
    return pixels[:, row * PATCH : (row + 1) * PATCH, column * PATCH : (column + 1) * PATCH].contiguous()


@contextmanager
def identified_by(hook_class, monkeypatch):
    """Stages opened within identify their rows by this hook."""

    def open_row_identifier(config, pipeline, runtime):
        return RowIdentifier(hook_class(pipeline), runtime) if config.enable_prefix_caching else None

    with monkeypatch.context() as patch:
        patch.setattr(assembly, "open_row_identifier", open_row_identifier)
        yield
