# SPDX-License-Identifier: Apache-2.0
"""Rotary positions: text counts in one dimension, image tokens in two, around the middle of where they stand.

Half of each head turns with a token's vertical place, half with its horizontal one. A text token at position p has p
for both. An image of `n` tokens from position s on has its middle at s + n / 2 in both directions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from omni_core.diffusion_kv.tiny_hunyuan.layouts import Grid, RowSlots

_BASE = 10_000.0


@dataclass(frozen=True, slots=True, eq=False)
class Rotary:
    """Cosines and sines of some tokens, `[tokens, 1, head_size / 2]`."""

    cos: torch.Tensor
    sin: torch.Tensor

    def window(self, start: int, stop: int) -> Rotary:
        """Of the tokens `[start, stop)`, positions as they were."""
        return Rotary(self.cos[start:stop], self.sin[start:stop])

    def turn(self, heads: torch.Tensor) -> torch.Tensor:
        """Turn `[rows, tokens, heads, head_size]`; computed in float32 at least, returned in its own type."""
        first, second = heads.to(self.cos).chunk(2, dim=-1)
        turned = torch.cat((first * self.cos - second * self.sin, second * self.cos + first * self.sin), dim=-1)
        return turned.to(heads.dtype)


def row_rotary(
    slots: RowSlots, num_references: int, prefix_tokens: int, head_size: int, dtype: torch.dtype, device: torch.device
) -> Rotary:
    """Of every token of a row.

    Args:
        slots: the layout.
        num_references: pictures in the row.
        prefix_tokens: where the timestep token stands.
        head_size: divisible by 4.
        dtype: of the tables.
        device: of the tables.
    """
    total_tokens = slots.row_layout(num_references, prefix_tokens).geometry.total_tokens
    places = torch.arange(total_tokens, dtype=torch.float64).repeat(2, 1)
    for start in slots.reference_starts(num_references):
        _place_image(places, start, slots.vae_grid)
        _place_image(places, start + slots.vae_grid.tokens + 1, slots.vit_grid)
    _place_image(places, prefix_tokens + 1, slots.target_grid)
    frequencies = _BASE ** (-torch.arange(head_size // 4, dtype=torch.float64) / (head_size // 4))
    angles = torch.cat([axis[:, None] * frequencies for axis in places], dim=-1)[:, None, :]
    return Rotary(cos=angles.cos().to(device=device, dtype=dtype), sin=angles.sin().to(device=device, dtype=dtype))


def _place_image(places: torch.Tensor, start: int, grid: Grid) -> None:
    """Overwrite the places of one image's tokens. `places`: `[2, tokens]`, vertical and horizontal."""
    middle = start + grid.tokens / 2
    vertical = middle - grid.height / 2 + torch.arange(grid.height, dtype=torch.float64)
    horizontal = middle - grid.width / 2 + torch.arange(grid.width, dtype=torch.float64)
    image = slice(start, start + grid.tokens)
    places[0, image] = vertical.repeat_interleave(grid.width)
    places[1, image] = horizontal.repeat(grid.height)
