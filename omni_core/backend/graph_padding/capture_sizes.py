# SPDX-License-Identifier: Apache-2.0
"""The token counts graphs were captured at, and the smallest of them that holds a step."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise


def round_up(count: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `count`."""
    return -(-count // multiple) * multiple


@dataclass(frozen=True, slots=True)
class CaptureSizes:
    """Token counts of captured graphs: strictly rising, from at least 1; empty: every step is eager.

    Raises:
        ValueError: the sizes do not rise strictly from at least 1.
    """

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if any(low >= high for low, high in pairwise((0, *self.sizes))):
            raise ValueError(f"capture sizes {self.sizes}: must rise strictly, from at least 1")

    @property
    def largest(self) -> int:
        """The largest size; 0 if there is none."""
        return self.sizes[-1] if self.sizes else 0

    def holding(self, num_tokens: int) -> int | None:
        """The smallest size that is at least `num_tokens`, or `None`."""
        index = bisect_left(self.sizes, num_tokens)
        return self.sizes[index] if index < len(self.sizes) else None
