# SPDX-License-Identifier: Apache-2.0
"""The row counts of captured ACL graphs: vllm-ascend's rule."""

from __future__ import annotations

from omni_core.backend.graph_padding import (
    AscendConfig,
    AscendGraphPadding,
    CaptureMode,
    CaptureSizes,
    GraphConfig,
    RunnerGraphPadding,
)


def graph_padding(capture_sizes: tuple[int, ...], ascend: AscendConfig | None = None) -> RunnerGraphPadding:
    """The rule of vllm-ascend for piecewise graphs at `capture_sizes` (sorted token counts; empty: eager).

    Args:
        capture_sizes: strictly rising.
        ascend: the settings of vllm-ascend; `None`: one rank, no sequence parallel.

    Raises:
        ValueError: the sizes do not rise strictly from at least 1, or do not go with `ascend`.
    """
    sizes = CaptureSizes(capture_sizes)
    # Piecewise graphs take any number of requests: the bound on them is not asked for.
    config = GraphConfig(capture_sizes=sizes, capture_mode=CaptureMode.PIECEWISE, max_num_seqs=max(1, sizes.largest))
    return AscendGraphPadding(config, ascend or AscendConfig())
