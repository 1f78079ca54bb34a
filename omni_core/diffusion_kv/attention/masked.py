# SPDX-License-Identifier: Apache-2.0
"""The reference: torch's attention with an explicit boolean mask. Every owner that uses it calls it alike."""

from __future__ import annotations

import torch
from torch.nn import functional

from omni_core.diffusion_kv.rows import RowLayout


def layout_mask(layout: RowLayout, query_start: int, query_end: int, device: torch.device) -> torch.Tensor:
    """Which keys `[0, query_end)` the queries `[query_start, query_end)` see: bool `[queries, keys]`."""
    mask = torch.ones(query_end - query_start, query_end, dtype=torch.bool, device=device).tril_(query_start)
    for span in layout.spans:
        first_query = max(span.start, query_start)
        if first_query < min(span.end, query_end):
            mask[first_query - query_start : span.end - query_start, span.start : span.end] = True
    return mask


def masked_attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Attention of grouped query heads. No key or value head is repeated in memory.

    Args:
        query: `[rows, queries, num_query_heads, head_size]`.
        keys: `[rows, num_kv_heads, keys, head_size]`; rows and heads evenly spaced.
        values: shaped like `keys`.
        mask: bool `[queries, keys]`; the same for every row and head.

    Returns:
        A tensor shaped like `query`.
    """
    num_rows, num_queries, num_heads, head_size = query.shape
    groups = num_rows * keys.shape[1]
    shared = num_heads // keys.shape[1]
    # Batch: one KV head of one row; its query heads all read that one head, through a stride of 0.
    grouped = query.transpose(1, 2).reshape(groups, shared, num_queries, head_size)
    attended = functional.scaled_dot_product_attention(
        grouped, _for_every_query_head(keys, shared), _for_every_query_head(values, shared), attn_mask=mask
    )
    return attended.reshape(num_rows, num_heads, num_queries, head_size).transpose(1, 2)


def _for_every_query_head(heads: torch.Tensor, shared: int) -> torch.Tensor:
    return heads.flatten(0, 1)[:, None].expand(-1, shared, -1, -1)
