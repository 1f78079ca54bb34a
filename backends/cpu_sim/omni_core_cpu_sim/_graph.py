# SPDX-License-Identifier: Apache-2.0
"""What captured graphs do to a caller: padded token counts, and output buffers the next replay overwrites."""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise

import torch

from omni_core.backend.base import GraphPadding
from omni_core_cpu_sim._memory import POISON_BYTE


class CaptureSizePadding(GraphPadding):
    """The smallest capture size that holds a step; a larger step runs without a graph, unpadded.

    Args:
        capture_sizes: strictly rising token counts of at least 1; empty: never a graph.

    Raises:
        ValueError: the sizes do not rise strictly from at least 1.
    """

    def __init__(self, capture_sizes: tuple[int, ...]) -> None:
        if any(low >= high for low, high in pairwise((0, *capture_sizes))):
            raise ValueError(f"capture_sizes={capture_sizes}: must rise strictly, from at least 1")
        self._capture_sizes = capture_sizes

    def padded(self, num_tokens: int) -> int:
        """The row count of the output of a step with `num_tokens` real rows; never smaller. Real rows come first.

        Raises:
            ValueError: `num_tokens` is below 1.
        """
        if num_tokens < 1:
            raise ValueError(f"num_tokens={num_tokens}: a step has at least 1 token")
        index = bisect_left(self._capture_sizes, num_tokens)
        return self._capture_sizes[index] if index < len(self._capture_sizes) else num_tokens

    @property
    def largest(self) -> int:
        """The largest capture size; 0 if there is none."""
        return self._capture_sizes[-1] if self._capture_sizes else 0


class GraphEmulator:
    """Gives a step's rows the way a captured graph would. Engine thread only.

    One static buffer per output key, as long as the largest capture size and shared by all sizes, as graphs share one
    memory pool: every replay overwrites what the last one gave. Rows behind the real ones hold `POISON_BYTE`. A step
    larger than every capture size gets fresh memory, as an eager step does.

    Args:
        capture_sizes: strictly rising token counts; empty: every step is eager.
    """

    def __init__(self, capture_sizes: tuple[int, ...]) -> None:
        self._padding = CaptureSizePadding(capture_sizes)
        self._buffers: dict[str, torch.Tensor] = {}

    @property
    def padding(self) -> CaptureSizePadding:
        """The rule the outputs are padded by."""
        return self._padding

    def replay(self, key: str, rows: torch.Tensor) -> torch.Tensor:
        """The output `key` of a step that computed `rows` (`(num_tokens, ...)`).

        The key's buffer is captured at its first graph step, in the rows' trailing shape and dtype.

        Returns:
            `(padded, ...)`, a view of the key's static buffer: the real rows first. Valid until the next `replay` of
            the key.

        Raises:
            ValueError: the rows differ in trailing shape or dtype from those the key was captured with.
        """
        num_tokens = rows.shape[0]
        padded = self._padding.padded(num_tokens)
        if num_tokens > self._padding.largest:
            return rows.clone(memory_format=torch.contiguous_format)
        buffer = self._buffers.get(key)
        if buffer is None:
            with torch.inference_mode(False):
                buffer = torch.empty((self._padding.largest, *rows.shape[1:]), dtype=rows.dtype, device="cpu")
            self._buffers[key] = buffer
        if rows.shape[1:] != buffer.shape[1:] or rows.dtype != buffer.dtype:
            raise ValueError(
                f"output {key!r} was captured as rows of {tuple(buffer.shape[1:])} {buffer.dtype}, "
                f"got {tuple(rows.shape[1:])} {rows.dtype}"
            )
        buffer.view(torch.uint8).fill_(POISON_BYTE)
        buffer[:num_tokens].copy_(rows)
        return buffer[:padded]
