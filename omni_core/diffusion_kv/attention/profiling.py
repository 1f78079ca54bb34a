# SPDX-License-Identifier: Apache-2.0
"""Attention with pages disabled, to measure the memory a forward takes; and what a layer without an attention says.

Profiling is an owner one asks for, never what happens when nobody gave one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from omni_core.diffusion_kv.attention.masked import layout_mask, masked_attention
from omni_core.diffusion_kv.attention.owner import KVShape, RowKey, StepAttention
from omni_core.diffusion_kv.attention.step_checks import LayerChecks, check_rows
from omni_core.diffusion_kv.errors import PagedAttentionError
from omni_core.diffusion_kv.rows import RowLayout


def required_attention(attention: StepAttention | None, layer_index: int) -> StepAttention:
    """The attention of a paged layer, for models that may be called without one.

    Raises:
        PagedAttentionError: there is none, so the layer's keys and values would be lost.
    """
    if attention is None:
        raise PagedAttentionError(
            f"layer {layer_index} was reached without an attention; give the step's, or that of a ProfilingAttention "
            "to measure memory"
        )
    return attention


class ProfilingAttention:
    """An `AttentionOwner` that keeps nothing. A later step sees its own tokens alone: sizes count, values do not."""

    def __init__(self, shape: KVShape, device: torch.device) -> None:
        """Take no memory."""
        self._shape = shape
        self._device = torch.empty(0, device=device).device

    def first_step(self, rows: Sequence[RowKey], layout: RowLayout) -> ProfilingStep:
        return self._begin(rows, layout, 0, layout.geometry.total_tokens)

    def later_step(self, rows: Sequence[RowKey], layout: RowLayout) -> ProfilingStep:
        return self._begin(rows, layout, layout.geometry.prefix_tokens, layout.geometry.target_end)

    def _begin(self, rows: Sequence[RowKey], layout: RowLayout, start: int, end: int) -> ProfilingStep:
        checks = LayerChecks(self._shape, self._device, len(check_rows(rows)), end - start)
        return ProfilingStep(tuple(rows), start, layout_mask(layout, start, end, self._device)[:, start:], checks)


class ProfilingStep:
    """`StepAttention` over the query tokens themselves."""

    def __init__(self, rows: tuple[RowKey, ...], start: int, mask: torch.Tensor, checks: LayerChecks) -> None:
        self._rows = rows
        self._start = start
        self._mask = mask
        self._checks = checks

    @property
    def rows(self) -> tuple[RowKey, ...]:
        return self._rows

    @property
    def query_start_tokens(self) -> int:
        return self._start

    @property
    def num_query_tokens(self) -> int:
        return self._mask.shape[0]

    def attend(self, layer_index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        self._checks.check(layer_index, query, key, value)
        self._checks.mark(layer_index)
        keys, values = key.transpose(1, 2).contiguous(), value.transpose(1, 2).contiguous()
        return masked_attention(query, keys, values, self._mask)
