# SPDX-License-Identifier: Apache-2.0
"""The schedule: rectified flow from noise at level 1 to a picture at level 0, by Euler steps."""

from __future__ import annotations

import torch


def noise_levels(num_steps: int, shift: float) -> tuple[float, ...]:
    """Noise level before each step and after the last: `num_steps + 1` numbers from 1 down to 0.

    Args:
        num_steps: at least 1.
        shift: above 1, more of the steps are spent where there is much noise.
    """
    even = (1.0 - step / num_steps for step in range(num_steps + 1))
    return tuple(shift * level / (1.0 + (shift - 1.0) * level) for level in even)


def guided(conditional: torch.Tensor, unconditional: torch.Tensor, guidance_scale: float) -> torch.Tensor:
    """The prediction, moved away from the unconditional one."""
    return unconditional + guidance_scale * (conditional - unconditional)


def euler_step(latents: torch.Tensor, velocity: torch.Tensor, level: float, next_level: float) -> torch.Tensor:
    """The latents at `next_level`; `latents` themselves stay as they are."""
    return latents + (next_level - level) * velocity
