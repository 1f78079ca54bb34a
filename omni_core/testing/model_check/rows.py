# SPDX-License-Identifier: Apache-2.0
"""How far two rows are apart, and may be for one token prefix: the arithmetic of a model depends on its batch."""

from __future__ import annotations

from collections.abc import Mapping

import torch

DEFAULT_TOLERANCES: Mapping[torch.dtype, float] = {
    torch.float64: 1e-10,
    torch.float32: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 2e-2,
}
"""Largest difference of two rows of one token prefix, relative to the row's largest element. Other dtypes: none."""


def tolerance_of(dtype: torch.dtype, tolerance: float | None) -> float:
    """What rows of `dtype` may differ by: `tolerance` if given, for floats; nothing for any other dtype."""
    if not dtype.is_floating_point:
        return 0.0
    return DEFAULT_TOLERANCES.get(dtype, 0.0) if tolerance is None else tolerance


def row_differences(rows: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """`(num_rows,)` float64: each row's largest difference, relative to the reference row's largest element.

    Rows that are not of one dtype and shape, or of no floating dtype and unequal, differ by infinity.
    """
    count = rows.shape[0]
    if rows.dtype != reference.dtype or rows.shape != reference.shape:
        return torch.full((count,), torch.inf, dtype=torch.float64)
    ours, theirs = rows.reshape(count, -1), reference.reshape(count, -1)
    if not rows.dtype.is_floating_point:
        unequal = (ours != theirs).any(1)
        return torch.where(unequal, torch.inf, 0.0).to(torch.float64)
    ours, theirs = ours.double(), theirs.double()
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    apart = torch.where(same, 0.0, (ours - theirs).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf)
    scale = torch.where(theirs.isfinite(), theirs.abs(), 0.0).amax(1)
    largest = apart.amax(1)
    return torch.where(largest == 0.0, 0.0, largest / scale)
