# SPDX-License-Identifier: Apache-2.0
"""The interface between a model's layers and whoever owns their keys and values.

A model computes queries, keys and values of the tokens `query_start .. query_start + num_query_tokens` of equal rows
and calls `attend` once per layer. Where the keys are kept, and which of them were there before, is the owner's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from omni_core.diffusion_kv.rows import RowLayout


@dataclass(frozen=True, slots=True, order=True)
class RowKey:
    """One CFG row of one request."""

    request_id: str
    row_index: int


@dataclass(frozen=True, slots=True)
class KVShape:
    """What the keys and values of one layer look like on this rank."""

    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype


class StepAttention(Protocol):
    """Attention of one forward over rows of one layout. Used inside that forward only, by the worker's thread."""

    @property
    def rows(self) -> tuple[RowKey, ...]:
        """The rows of the batch dimension, in order."""
        ...

    @property
    def query_start_tokens(self) -> int:
        """Position of the first query token: 0, the hit, or the prefix."""
        ...

    @property
    def num_query_tokens(self) -> int:
        """Query tokens of each row."""
        ...

    def attend(self, layer_index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Keep `key` and `value`, then attend to all the layout lets each query see.

        Args:
            layer_index: which layer, from 0; each layer once per forward.
            query: `[rows, num_query_tokens, num_query_heads, head_size]`.
            key: `[rows, num_query_tokens, num_kv_heads, head_size]`.
            value: shaped like `key`.

        Returns:
            A tensor shaped like `query`.

        Raises:
            PagedAttentionError: shape, dtype or device is not the pool's, or the layer is out of range.
        """
        ...


class AttentionOwner(Protocol):
    """Who keeps keys and values. One per worker."""

    def first_step(self, rows: Sequence[RowKey], layout: RowLayout) -> StepAttention:
        """Attention over `[hit, total)` of each row; writes those positions.

        Raises:
            PagedAttentionError: the rows' hits differ, or a row is not installed.
        """
        ...

    def later_step(self, rows: Sequence[RowKey], layout: RowLayout) -> StepAttention:
        """Attention over `[prefix, prefix + target)`; the trailer is not seen.

        Raises:
            PagedAttentionError: a row is not installed or had no first step.
        """
        ...
