# SPDX-License-Identifier: Apache-2.0
"""Where the rows of one forward may start: whole pages, the same for all, and on demand never inside an image."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from omni_core.diffusion_kv.reservations import RowDemand
from omni_core.diffusion_kv.rows import ImageFeature


def before_image(hit_tokens: int, features: Iterable[ImageFeature], block_size: int) -> int:
    """The longest hit up to `hit_tokens` that ends inside none of `features`.

    For models that cannot prove that an image's identity covers its whole span.
    """
    spans = tuple(features)
    while True:
        inside = [span.start for span in spans if span.start < hit_tokens < span.end]
        if not inside:
            return hit_tokens
        hit_tokens = min(inside) // block_size * block_size


def features_of(rows: Sequence[RowDemand]) -> Iterable[ImageFeature]:
    """The images of all rows."""
    return (feature for row in rows if row.identity is not None for feature in row.identity.features)
