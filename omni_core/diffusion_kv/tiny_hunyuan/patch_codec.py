# SPDX-License-Identifier: Apache-2.0
"""A linear patch autoencoder: each square of pixels to the strongest of its cosine coefficients, and back.

Nothing is learned: the kernels are an orthonormal cosine transform over brightness and two colour differences, fine
frequencies left out, so that a real picture comes back recognisable. Coefficients are divided by how large they tend to
be in pictures, so that latents are about as large as unit noise, and unit noise looks like patches of a picture.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from omni_core.diffusion_kv.tiny_hunyuan.layouts import PATCH_PIXELS

LATENT_CHANNELS = 48
"""28 coefficients of brightness and 10 of each colour difference."""

_BRIGHTNESS_ORDERS = 7
_COLOUR_ORDERS = 4
_COLOURS = ((1.0, 1.0, 1.0), (1.0, 0.0, -1.0), (1.0, -2.0, 1.0))


class PatchCodec:
    """Pictures to latents and back. Deterministic."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        """Work in `dtype`."""
        kernels, amplitudes = _cosine_kernels()
        self._kernels = kernels.to(device=device, dtype=dtype)
        self._amplitudes = amplitudes.to(device=device, dtype=dtype)[:, None, None]

    def encode(self, planes: torch.Tensor) -> torch.Tensor:
        """Pixels `[3, height, width]` in [-1, 1] to `[LATENT_CHANNELS, rows, columns]` of patches."""
        coefficients = functional.conv2d(planes.to(self._kernels)[None], self._kernels, stride=PATCH_PIXELS)[0]
        return coefficients / self._amplitudes

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """The reverse; what the left-out frequencies held is lost."""
        coefficients = latents * self._amplitudes
        return functional.conv_transpose2d(coefficients[None], self._kernels, stride=PATCH_PIXELS)[0]


def _cosine_kernels() -> tuple[torch.Tensor, torch.Tensor]:
    """Kernels `[channels, 3, PATCH_PIXELS, PATCH_PIXELS]` and each one's usual size."""
    places = torch.arange(PATCH_PIXELS, dtype=torch.float64) + 0.5
    orders = torch.arange(PATCH_PIXELS, dtype=torch.float64)
    waves = torch.cos(math.pi / PATCH_PIXELS * orders[:, None] * places) * math.sqrt(2.0 / PATCH_PIXELS)
    waves[0] *= math.sqrt(0.5)
    kernels, amplitudes = [], []
    for index, colour in enumerate(_COLOURS):
        direction = torch.tensor(colour, dtype=torch.float64)
        direction /= direction.norm()
        largest = _BRIGHTNESS_ORDERS if index == 0 else _COLOUR_ORDERS
        for order in range(largest):
            for vertical in range(order + 1):
                wave = waves[vertical][:, None] * waves[order - vertical]
                kernels.append(direction[:, None, None] * wave)
                amplitudes.append((1.0 if index == 0 else 0.3) * PATCH_PIXELS * 0.8 / (1 + order) ** 1.5)
    return torch.stack(kernels), torch.tensor(amplitudes, dtype=torch.float64)
