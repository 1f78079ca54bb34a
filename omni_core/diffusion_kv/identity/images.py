# SPDX-License-Identifier: Apache-2.0
"""One digest per reference image: everything the keys and values of its span depend on, so that images stand alone.

Replacing the second image leaves the first one's digest as it was. What ties images together is the generator their
latents are drawn from, one after the other: an image's digest holds the generator's state before its own draw.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from omni_core.diffusion_kv.errors import RowError
from omni_core.diffusion_kv.identity.canonical import canonical_digest
from omni_core.diffusion_kv.rows import ImageFeature

_CONTENT_DOMAIN = "omni_core.diffusion_kv.image/1"
_FEATURE_DOMAIN = "omni_core.diffusion_kv.feature/1"


@dataclass(frozen=True, slots=True)
class Draw:
    """One draw from the generator."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class SeededDraws:
    """A generator made from a seed; nothing but the images' latents is drawn before the last of them."""

    seed: int
    device: str
    """Of the generator: one seed gives other numbers on another device."""

    def state_before(self, earlier: Sequence[Draw]) -> object:
        """What decides the numbers of the draw that follows `earlier`."""
        return {"seed": self.seed, "device": self.device, "earlier": [[list(d.shape), d.dtype] for d in earlier]}


@dataclass(frozen=True, slots=True, eq=False)
class GeneratorDraws:
    """A generator the client handed in. `states[i]` is its full state before the i-th draw, `Generator.get_state()`."""

    device: str
    states: tuple[torch.Tensor, ...]

    def state_before(self, earlier: Sequence[Draw]) -> object:
        """What decides the numbers of the draw that follows `earlier`.

        Raises:
            RowError: there is no state for so many draws.
        """
        if len(earlier) >= len(self.states):
            raise RowError(
                f"{len(self.states)} generator states for more than {len(earlier)} draws; give the state before each"
            )
        return {"device": self.device, "state": self.states[len(earlier)]}


@dataclass(frozen=True, slots=True)
class UnrepeatableDraws:
    """Neither a generator nor a seed: no image that draws is ever shared."""

    unique_value: Callable[[], bytes]
    """A value no other request gets."""

    def state_before(self, earlier: Sequence[Draw]) -> object:
        """A value of this request alone."""
        return {"unique": self.unique_value(), "earlier": len(earlier)}


LatentDraws = SeededDraws | GeneratorDraws | UnrepeatableDraws
"""Where the latents of a request's reference images come from."""


@dataclass(frozen=True, slots=True, eq=False)
class ReferenceImage:
    """One reference image as its encoders take it: after cropping, resizing and normalising, never a file's bytes."""

    tensors: Mapping[str, torch.Tensor | npt.NDArray[np.generic]]
    """VAE input, ViT input, sizes, keyword tensors; by name."""
    grids: Mapping[str, tuple[int, int]]
    """Height and width in tokens of each of its parts."""
    draw: Draw | None
    """Of its latent; `None` where nothing is sampled, and then no generator is in its digest."""
    is_reference: bool = True
    flags: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Plain values that change what the encoders make of it."""


def image_digests(images: Sequence[ReferenceImage], draws: LatentDraws) -> tuple[bytes, ...]:
    """The digest of each image, wherever it stands in a row. Hash once per request, then `place` per row.

    Args:
        images: in the order they are encoded, which is that of their draws.
        draws: where their latents come from.

    Raises:
        IdentityValueError: a tensor or flag has no canonical hash.
        RowError: a generator state is missing.
    """
    digests = []
    earlier: list[Draw] = []
    for image in images:
        content = {
            "tensors": dict(image.tensors),
            "grids": {name: list(grid) for name, grid in image.grids.items()},
            "is_reference": image.is_reference,
            "flags": dict(image.flags),
            "draw": None if image.draw is None else [list(image.draw.shape), image.draw.dtype],
            "before": None if image.draw is None else draws.state_before(earlier),
        }
        digests.append(canonical_digest(_CONTENT_DOMAIN, content))
        if image.draw is not None:
            earlier.append(image.draw)
    return tuple(digests)


def place(digest: bytes, start: int, end: int) -> ImageFeature:
    """The image of `digest` at tokens `[start, end)` of a row.

    Keys carry their absolute position, so an image elsewhere is another one. vLLM's chain tells the two apart already;
    the identifier does too, so that no version of it is relied on, and no hit is lost by it.
    """
    return ImageFeature(canonical_digest(_FEATURE_DOMAIN, [digest, start, end]).hex(), start, end)
