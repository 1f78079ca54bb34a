# SPDX-License-Identifier: Apache-2.0
"""Pixels of any size to what an encoder takes."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional

from omni_core.diffusion_kv.errors import RequestRefusedError
from omni_core.diffusion_kv.pipeline import Pixels
from omni_core.diffusion_kv.tiny_hunyuan.layouts import PATCH_PIXELS, Grid


def check_picture(request_id: str, name: str, pixels: Pixels) -> None:
    """Check that `pixels` are RGB bytes of at least one pixel.

    Raises:
        RequestRefusedError: another shape or type, or an empty picture.
    """
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
        found = f"{pixels.dtype} {pixels.shape}" if isinstance(pixels, np.ndarray) else type(pixels).__name__
        raise RequestRefusedError(request_id, f"{name} is {found}; uint8 [height, width, 3] is wanted")
    if pixels.size == 0:
        raise RequestRefusedError(request_id, f"{name} is empty: {pixels.shape[0]} x {pixels.shape[1]} pixels")


def fitted(pixels: Pixels, grid: Grid) -> torch.Tensor:
    """The picture's middle in the grid's proportions, resized to the grid's pixels.

    Args:
        pixels: uint8 `[height, width, 3]`.
        grid: image tokens; each stands for a square of `PATCH_PIXELS`.

    Returns:
        float32 `[3, height, width]` in [-1, 1].
    """
    height, width = pixels.shape[:2]
    kept_height = min(height, max(1, width * grid.height // grid.width))
    kept_width = min(width, max(1, height * grid.width // grid.height))
    top, left = (height - kept_height) // 2, (width - kept_width) // 2
    middle = pixels[top : top + kept_height, left : left + kept_width].copy()  # a picture may be read-only
    planes = torch.from_numpy(middle).permute(2, 0, 1).to(torch.float32)
    resized = functional.interpolate(
        planes[None],
        size=(grid.height * PATCH_PIXELS, grid.width * PATCH_PIXELS),
        mode="bilinear",
        align_corners=False,
        antialias=True,
    )[0]
    return resized.div_(127.5).sub_(1.0).clamp_(-1.0, 1.0).contiguous()


def to_pixels(planes: torch.Tensor) -> Pixels:
    """`[3, height, width]` in [-1, 1], clipped, as uint8 `[height, width, 3]`."""
    scaled = planes.detach().to(device="cpu", dtype=torch.float64).add(1.0).mul(127.5).round().clamp(0, 255)
    return np.ascontiguousarray(scaled.to(torch.uint8).permute(1, 2, 0).numpy())
