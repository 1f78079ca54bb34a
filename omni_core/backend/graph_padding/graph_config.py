# SPDX-License-Identifier: Apache-2.0
"""What an engine captured graphs for."""

from __future__ import annotations

from dataclasses import dataclass

from omni_core.backend.graph_padding.capture_sizes import CaptureSizes
from omni_core.backend.graph_padding.graph_mode import CaptureMode
from omni_core.backend.graph_padding.lora_graphs import NO_LORA, LoraGraphs


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphConfig:
    """The settings of an engine that padding depends on, as they are after start-up.

    Raises:
        ValueError: a count below 1.
    """

    capture_sizes: CaptureSizes
    """`cudagraph_capture_sizes`; the largest is `max_cudagraph_capture_size`."""
    capture_mode: CaptureMode
    max_num_seqs: int
    query_len: int = 1
    """Tokens of one request in a decode step: 1 + `num_speculative_tokens`."""
    lora: LoraGraphs = NO_LORA

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1 or self.query_len < 1:
            raise ValueError(f"max_num_seqs={self.max_num_seqs} query_len={self.query_len}: both must be at least 1")
