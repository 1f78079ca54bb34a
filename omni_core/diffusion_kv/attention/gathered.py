# SPDX-License-Identifier: Apache-2.0
"""The reference owner of pages: a layer's keys are gathered into one tensor, and torch attends with a mask.

Any dtype, any device torch has. A page holds its tokens in order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from omni_core.diffusion_kv.attention.masked import layout_mask, masked_attention
from omni_core.diffusion_kv.attention.paged import PagedAttention, PagedForward, PagedLayers
from omni_core.diffusion_kv.worker.kv_worker import KVWorker


class GatheredAttention(PagedAttention):
    """Gathered pages and `scaled_dot_product_attention`."""

    def __init__(self, worker: KVWorker) -> None:
        """Allocate index buffers, and room for the gathered keys and values of every row the worker can hold."""
        super().__init__(worker)
        shape, tables = worker.shape, worker.tables
        heads = tables.num_rows * shape.num_kv_heads
        num_tokens = self._slots.max_tokens
        self._write_base, self._heads = worker.memory.allocate(2, (num_tokens,), torch.int64)
        self._key_rows, self._value_rows = worker.memory.allocate(2, (num_tokens * shape.num_kv_heads,), torch.int64)
        self._key_halves, self._value_halves = worker.memory.allocate(
            2, (heads * tables.max_blocks_per_row,), torch.int64
        )
        self._keys, self._values = worker.memory.allocate(
            2, (num_tokens * shape.num_kv_heads * shape.head_size,), shape.dtype
        )
        torch.arange(0, shape.num_kv_heads, out=self._heads[: shape.num_kv_heads])

    def _prepare(self, forward: PagedForward) -> PagedLayers:
        shape, block_size = self._worker.shape, self._worker.pool.block_size
        key_rows, value_rows = self._places(forward)
        num_blocks = -(-forward.plan.query_end // block_size)
        count = forward.num_rows * shape.num_kv_heads * num_blocks
        key_halves, value_halves = self._key_halves[:count], self._value_halves[:count]
        heads = self._heads[: shape.num_kv_heads, None]
        of_rows = key_halves.view(forward.num_rows, shape.num_kv_heads, num_blocks)
        of_rows.copy_(forward.block_tables[:, None, :num_blocks].expand_as(of_rows))
        of_rows.mul_(shape.num_kv_heads).add_(heads).mul_(2)
        torch.add(key_halves, 1, out=value_halves)
        gathered = count * block_size * shape.head_size
        return _GatheredLayers(
            block_size=block_size,
            num_rows=forward.num_rows,
            num_keys=forward.plan.query_end,
            mask=layout_mask(forward.layout, forward.plan.query_start, forward.plan.query_end, forward.slots.device),
            key_rows=key_rows,
            value_rows=value_rows,
            key_halves=key_halves,
            value_halves=value_halves,
            keys=self._keys[:gathered],
            values=self._values[:gathered],
        )

    def _places(self, forward: PagedForward) -> tuple[torch.Tensor, torch.Tensor]:
        """Where a layer, seen as vectors of `head_size`, holds the forward's keys and its values."""
        num_kv_heads, block_size = self._worker.shape.num_kv_heads, self._worker.pool.block_size
        num_tokens = forward.slots.numel()
        base = self._write_base[:num_tokens]
        torch.div(forward.slots, block_size, rounding_mode="floor", out=base)
        # page * (num_kv_heads * 2 * block_size) + place, with place = slot - page * block_size
        base.mul_((2 * num_kv_heads - 1) * block_size).add_(forward.slots)
        key_rows = self._key_rows[: num_tokens * num_kv_heads]
        of_heads = key_rows.view(num_tokens, num_kv_heads)
        of_heads.copy_(self._heads[:num_kv_heads].expand_as(of_heads)).mul_(2 * block_size).add_(base[:, None])
        value_rows = self._value_rows[: num_tokens * num_kv_heads]
        torch.add(key_rows, block_size, out=value_rows)
        return key_rows, value_rows


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _GatheredLayers:
    """One forward."""

    block_size: int
    num_rows: int
    num_keys: int
    mask: torch.Tensor
    key_rows: torch.Tensor
    value_rows: torch.Tensor
    key_halves: torch.Tensor
    value_halves: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    def write(self, pages: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        vectors = pages.view(-1, pages.shape[-1])
        vectors.index_copy_(0, self.key_rows, key.reshape(-1, key.shape[-1]))
        vectors.index_copy_(0, self.value_rows, value.reshape(-1, value.shape[-1]))

    def attend(self, pages: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        keys = self._gather(pages, self.key_halves, self.keys)
        values = self._gather(pages, self.value_halves, self.values)
        return masked_attention(query, keys, values, self.mask)

    def _gather(self, pages: torch.Tensor, halves: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """`[rows, num_kv_heads, num_keys, head_size]`; whole pages are copied, the rest of the last is not read."""
        num_kv_heads, head_size = pages.shape[1], pages.shape[-1]
        half_pages = pages.view(-1, self.block_size * head_size)
        torch.index_select(half_pages, 0, halves, out=out.view(halves.numel(), -1))
        return out.view(self.num_rows, num_kv_heads, -1, head_size)[:, :, : self.num_keys]
