# SPDX-License-Identifier: Apache-2.0
"""Times something next to its physical floor, round by round, and says how many times the floor it costs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

T = TypeVar("T")

RESAMPLES = 2000
LEVEL_PERCENT = 95


@dataclass
class PairedSamples:
    """Seconds of a call and of its floor, taken in the same rounds of one run.

    Rounds are resampled whole, so a slow moment of the machine, which hits both, widens the interval less than it would
    if call and floor were measured one after the other.
    """

    name: str
    floor_name: str
    num_requests: int
    num_bytes: int
    call_s: list[float] = field(default_factory=list)
    floor_s: list[float] = field(default_factory=list)

    def take(self, call: Callable[[], T], floor: Callable[[], object], settle: Callable[[], object]) -> T:
        """One round; returns what the call returned.

        Who goes first alternates, because the second finds warmer caches. `settle` follows the call untimed: whatever
        the call left to other threads must not slow the floor down.
        """
        if len(self.call_s) % 2:
            self.time_floor(floor)
            result = self.time_call(call)
            settle()
        else:
            result = self.time_call(call)
            settle()
            self.time_floor(floor)
        return result

    def time_call(self, call: Callable[[], T]) -> T:
        """Half a round."""
        began = time.perf_counter()
        result = call()
        self.call_s.append(time.perf_counter() - began)
        return result

    def time_floor(self, floor: Callable[[], object]) -> None:
        """The other half."""
        began = time.perf_counter()
        floor()
        self.floor_s.append(time.perf_counter() - began)

    def result(self, seed: int) -> dict[str, object]:
        """Medians, their ratio, and its bootstrap interval."""
        call, floor = np.array(self.call_s), np.array(self.floor_s)
        generator = np.random.default_rng(seed)
        ratios = []
        for _ in range(RESAMPLES):
            rounds = generator.integers(0, len(call), len(call))
            ratios.append(np.median(call[rounds]) / np.median(floor[rounds]))
        outside_percent = (100 - LEVEL_PERCENT) / 2
        low, high = np.percentile(ratios, [outside_percent, 100 - outside_percent])
        return {
            "name": self.name,
            "requests": self.num_requests,
            "bytes": self.num_bytes,
            "rounds": len(call),
            "median_us": float(np.median(call)) * 1e6,
            "floor": self.floor_name,
            "floor_median_us": float(np.median(floor)) * 1e6,
            "ratio": float(np.median(call) / np.median(floor)),
            "ratio_low": float(low),
            "ratio_high": float(high),
        }
