# SPDX-License-Identifier: Apache-2.0
"""Seeded random weights. Nothing here was ever trained."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional


class WeightSource:
    """Draws weights in a fixed order from one seed. Numbers are the same for every dtype, but for rounding."""

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        """Draw from `seed`; torch's own generators are left alone."""
        self._generator = torch.Generator().manual_seed(seed)
        self._dtype = dtype
        self._device = device

    def normal(self, shape: Sequence[int], *, std: float) -> torch.Tensor:
        """Normally distributed numbers around 0."""
        drawn = torch.randn(tuple(shape), generator=self._generator, dtype=torch.float64)
        return drawn.mul_(std).to(device=self._device, dtype=self._dtype)

    def matrix(self, width_in: int, width_out: int, *, gain: float = 1.0) -> torch.Tensor:
        """`[width_out, width_in]` that keeps the variance of its input, times `gain`."""
        return self.normal((width_out, width_in), std=gain * width_in**-0.5)


def rms_norm(hidden: torch.Tensor) -> torch.Tensor:
    """Each vector of the last dimension, scaled to a mean square of 1."""
    return functional.rms_norm(hidden, hidden.shape[-1:], eps=1e-6)
