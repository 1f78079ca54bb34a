# SPDX-License-Identifier: Apache-2.0
"""The row counts of captured CUDA graphs: vLLM's rule."""

from __future__ import annotations

from omni_core.backend.graph_padding import CaptureMode, CaptureSizes, GraphConfig, RunnerGraphPadding, V1GraphPadding


def graph_padding(capture_sizes: tuple[int, ...]) -> RunnerGraphPadding:
    """The rule of vLLM for piecewise graphs at `capture_sizes` (sorted token counts; empty: eager).

    Raises:
        ValueError: the sizes do not rise strictly from at least 1.
    """
    sizes = CaptureSizes(capture_sizes)
    # Piecewise graphs take any number of requests: the bound on them is not asked for.
    config = GraphConfig(capture_sizes=sizes, capture_mode=CaptureMode.PIECEWISE, max_num_seqs=max(1, sizes.largest))
    return V1GraphPadding(config)
