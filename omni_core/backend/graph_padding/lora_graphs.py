# SPDX-License-Identifier: Apache-2.0
"""Graphs are captured per number of active LoRA adapters; which numbers, and which of them serves a step.

Source: vLLM 0.32, `lora/utils.py` `get_captured_lora_counts`, `v1/cudagraph_dispatcher.py` `_get_lora_cases` and
`dispatch`, `v1/worker/gpu/cudagraph_utils.py` `_build_lora_dispatch_map`.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from enum import Enum, auto


class LoraCapture(Enum):
    """For which steps graphs are captured."""

    ONLY_ACTIVE = auto()
    """Only with adapters, at the largest count: `cudagraph_specialize_lora` off."""
    WITH_AND_WITHOUT = auto()
    """Without adapters, and at the largest count: the default."""
    BY_COUNT = auto()
    """Without adapters, at the powers of two and at the largest count: `specialize_active_lora`."""


@dataclass(frozen=True, slots=True)
class LoraGraphs:
    """The adapter counts graphs were captured at; 0 is a step without adapters.

    Raises:
        ValueError: the counts do not rise strictly from at least 0, or there is none.
    """

    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.counts or self.counts[0] < 0 or sorted(set(self.counts)) != list(self.counts):
            raise ValueError(f"adapter counts {self.counts}: must rise strictly, from at least 0")

    @classmethod
    def captured(cls, capture: LoraCapture, *, max_loras: int) -> LoraGraphs:
        """The counts of an engine that serves `max_loras` adapters at a time."""
        largest = max_loras + 1
        if capture is LoraCapture.ONLY_ACTIVE:
            return cls((largest,))
        if capture is LoraCapture.WITH_AND_WITHOUT:
            return cls((0, largest))
        powers = {1 << exponent for exponent in range(largest.bit_length()) if 1 << exponent <= largest}
        return cls((0, *sorted(powers | {largest})))

    def serving(self, num_active_loras: int) -> int | None:
        """The count whose graph serves a step with `num_active_loras` adapters, or `None`."""
        if num_active_loras == 0:
            return 0 if self.counts[0] == 0 else None
        index = bisect_left(self.counts, num_active_loras)
        return self.counts[index] if index < len(self.counts) else None


NO_LORA = LoraGraphs((0,))
"""An engine without adapters."""
