# SPDX-License-Identifier: Apache-2.0
"""The rows of tiny-hunyuan as data: how long each text slot is, how large each picture, and how wide the model.

    [ head | reference | between | reference | tail | t | target image | trailer ]

A reference is one bidirectional span: VAE tokens, a separator, ViT tokens. The prompt stands in the tail, behind the
references, so that other prompts share the pages of the same pictures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from omni_core.diffusion_kv.rows import BidirectionalSpan, RowGeometry, RowLayout

PATCH_PIXELS = 16
"""Sides of the square of pixels behind one image token, VAE and ViT alike."""
TRAILER_TOKENS = 2
"""End of image, end of row."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Image tokens, row by row."""

    height: int
    width: int

    @property
    def tokens(self) -> int:
        return self.height * self.width


@dataclass(frozen=True, slots=True)
class TransformerSize:
    """How wide and deep the transformer is, before tensor parallelism."""

    num_layers: int
    dim: int
    num_query_heads: int
    num_kv_heads: int
    head_size: int
    mlp_dim: int
    vit_dim: int


@dataclass(frozen=True, slots=True)
class RowSlots:
    """The lengths a row is put together from."""

    head_tokens: int
    """Text before the first reference: the system prompt."""
    between_tokens: int
    """Text between two references."""
    tail_tokens: int
    """Text behind the last reference: the prompt and the target's size."""
    vae_grid: Grid
    vit_grid: Grid
    target_grid: Grid
    max_references: int

    @property
    def reference_tokens(self) -> int:
        """One reference: VAE tokens, separator, ViT tokens."""
        return self.vae_grid.tokens + 1 + self.vit_grid.tokens

    @property
    def target_tokens(self) -> int:
        """The timestep token and the target image's."""
        return 1 + self.target_grid.tokens

    def tokens_before_tail(self, num_references: int) -> int:
        """Head, references and what stands between them."""
        between = max(num_references - 1, 0) * self.between_tokens
        return self.head_tokens + num_references * self.reference_tokens + between

    def reference_starts(self, num_references: int) -> tuple[int, ...]:
        """Position of each reference's first VAE token."""
        stride = self.reference_tokens + self.between_tokens
        return tuple(self.head_tokens + index * stride for index in range(num_references))

    def row_layout(self, num_references: int, prefix_tokens: int) -> RowLayout:
        """The row of `prefix_tokens` with so many references; the tail takes what the rest leaves."""
        spans = [
            BidirectionalSpan(start, start + self.reference_tokens) for start in self.reference_starts(num_references)
        ]
        target_end = prefix_tokens + self.target_tokens
        spans.append(BidirectionalSpan(prefix_tokens + 1, target_end))
        return RowLayout(
            geometry=RowGeometry(
                prefix_tokens=prefix_tokens,
                target_tokens=self.target_tokens,
                total_tokens=target_end + TRAILER_TOKENS,
            ),
            spans=tuple(spans),
        )


@dataclass(frozen=True, slots=True)
class Preset:
    """A named size of the whole model."""

    slots: RowSlots
    transformer: TransformerSize


_FULL_SIZE = TransformerSize(
    num_layers=6, dim=384, num_query_heads=6, num_kv_heads=2, head_size=64, mlp_dim=1_024, vit_dim=192
)

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "small": Preset(  # 37 + 453 + 53: prefix 543, total 802
            RowSlots(
                head_tokens=37,
                between_tokens=20,
                tail_tokens=53,
                vae_grid=Grid(16, 16),
                vit_grid=Grid(14, 14),
                target_grid=Grid(16, 16),
                max_references=1,
            ),
            _FULL_SIZE,
        ),
        "big": Preset(  # 37 + 725 + 20 + 725 + 127: prefix 1,634, total 2,037
            RowSlots(
                head_tokens=37,
                between_tokens=20,
                tail_tokens=127,
                vae_grid=Grid(20, 20),
                vit_grid=Grid(18, 18),
                target_grid=Grid(20, 20),
                max_references=2,
            ),
            _FULL_SIZE,
        ),
        "debug": Preset(  # 11 + 26 + 7 + 26 + 21: prefix 91, total 110; for tests that run thousands of steps
            RowSlots(
                head_tokens=11,
                between_tokens=7,
                tail_tokens=21,
                vae_grid=Grid(4, 4),
                vit_grid=Grid(3, 3),
                target_grid=Grid(4, 4),
                max_references=2,
            ),
            TransformerSize(
                num_layers=2, dim=64, num_query_heads=4, num_kv_heads=2, head_size=32, mlp_dim=128, vit_dim=32
            ),
        ),
    }
)
"""The layouts by the name a deploy file uses."""
