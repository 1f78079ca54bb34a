# SPDX-License-Identifier: Apache-2.0
"""Real threads that stop for a moment at chosen checkpoints, so that interleavings which are rare become common."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from omni_core.runtime import ThreadingRuntime


@dataclass(frozen=True, slots=True)
class Stall:
    """How often and how long a thread stops."""

    chance: float
    """Between 0 and 1."""
    longest_s: float


class StallingRuntime(ThreadingRuntime):
    """The production runtime, whose checkpoints may sleep.

    The choices come from a seed, but which thread meets which choice depends on the machine: a failure found here is
    real, and may need several runs to come back.

    Args:
        seed: decides when to stall.
        stalls: checkpoint name, or the beginning of one, such as `prefetch.` → how it stalls. The first match counts.
    """

    def __init__(self, seed: int, stalls: Mapping[str, Stall]) -> None:
        self._rng = random.Random(seed)
        self._stalls = dict(stalls)

    def checkpoint(self, name: str) -> None:
        for beginning, stall in self._stalls.items():
            if name.startswith(beginning):
                if self._rng.random() < stall.chance:
                    self.sleep(self._rng.random() * stall.longest_s)
                return
