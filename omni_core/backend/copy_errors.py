# SPDX-License-Identifier: Apache-2.0
"""How `copy_to_host` refuses, in the same words on every device, what would be cast, broadcast, gathered or waited for.

Only the errors: a backend asks itself, because a call more per step is one on the engine thread.
"""

from __future__ import annotations

import torch


def unequal_copy(destination: torch.Tensor, source: torch.Tensor) -> ValueError:
    """Shapes or dtypes differ."""
    return ValueError(
        f"copy_to_host: destination is {tuple(destination.shape)} {destination.dtype}, "
        f"source is {tuple(source.shape)} {source.dtype}; both must be equal"
    )


def strided_copy(destination: torch.Tensor, source: torch.Tensor) -> ValueError:
    """One of them is not contiguous."""
    return ValueError(
        f"copy_to_host: destination strides {destination.stride()} and source strides {source.stride()} for "
        f"shape {tuple(source.shape)}; both must be contiguous"
    )


def copy_outside_arenas(destination: torch.Tensor) -> ValueError:
    """No live arena of the backend holds the destination."""
    return ValueError(
        f"copy_to_host: destination {tuple(destination.shape)} {destination.dtype} on {destination.device} "
        "lies in no live pinned arena of this backend; carve it from pinned_arena(...).buffer"
    )
