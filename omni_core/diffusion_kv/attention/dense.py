# SPDX-License-Identifier: Apache-2.0
"""Keys and values in one piece per request, no pages: what a model without a scheduler does (`dense_legacy`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from omni_core.diffusion_kv.attention.masked import layout_mask, masked_attention
from omni_core.diffusion_kv.attention.owner import KVShape, RowKey
from omni_core.diffusion_kv.attention.step_checks import LayerChecks, check_rows
from omni_core.diffusion_kv.errors import PagedAttentionError
from omni_core.diffusion_kv.rows import RowLayout


@dataclass(slots=True, eq=False)
class _Kept:
    """One request."""

    rows: tuple[RowKey, ...]
    layout: RowLayout
    tensor: torch.Tensor
    """`[num_layers, 2, rows, num_kv_heads, total, head_size]`: keys, then values."""
    first_step_done: bool = False


class DenseAttention:
    """An `AttentionOwner` that never hits. The worker's thread. Each request's memory is taken at its first step."""

    def __init__(self, shape: KVShape, device: torch.device) -> None:
        """Hold nothing yet.

        Args:
            shape: keys and values of one layer on this rank.
            device: where the model computes them.
        """
        self._shape = shape
        # With the index torch gives its tensors.
        self._device = torch.empty(0, device=device).device
        self._kept: dict[str, _Kept] = {}

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Requests whose keys and values are held."""
        return tuple(self._kept)

    @property
    def nbytes(self) -> int:
        """Device bytes held."""
        return sum(kept.tensor.nbytes for kept in self._kept.values())

    def first_step(self, rows: Sequence[RowKey], layout: RowLayout) -> DenseStep:
        """Attention over the whole rows. A request that is held begins again.

        Raises:
            PagedAttentionError: no row, one twice, or a request's rows not side by side.
        """
        shape, total = self._shape, layout.geometry.total_tokens
        requests = _by_request(check_rows(rows))
        for request_id, of_request in requests.items():
            size = (shape.num_layers, 2, len(of_request), shape.num_kv_heads, total, shape.head_size)
            tensor = torch.empty(size, dtype=shape.dtype, device=self._device)
            self._kept[request_id] = _Kept(of_request, layout, tensor)
        return self._begin(requests, layout, 0, total)

    def later_step(self, rows: Sequence[RowKey], layout: RowLayout) -> DenseStep:
        """Attention over `[prefix, prefix + target)`; the trailer is not seen.

        Raises:
            PagedAttentionError: a request had no complete first step, or had it with other rows or another layout.
        """
        requests = _by_request(check_rows(rows))
        for request_id, of_request in requests.items():
            kept = self._kept.get(request_id)
            if kept is None or not kept.first_step_done:
                raise PagedAttentionError(
                    f"request {request_id!r}: a later step, but its first one was not computed in every layer"
                )
            if kept.rows != of_request or kept.layout != layout:
                raise PagedAttentionError(
                    f"request {request_id!r}: its first step was of the rows {list(kept.rows)} and {kept.layout}; this "
                    f"step is of {list(of_request)} and {layout}"
                )
        return self._begin(requests, layout, layout.geometry.prefix_tokens, layout.geometry.target_end)

    def release(self, request_id: str) -> None:
        """Drop what is held of a request; of none, nothing."""
        self._kept.pop(request_id, None)

    def _begin(self, requests: dict[str, tuple[RowKey, ...]], layout: RowLayout, start: int, end: int) -> DenseStep:
        kept = [self._kept[request_id] for request_id in requests]
        mask = layout_mask(layout, start, end, self._device)
        rows = tuple(row for of_request in requests.values() for row in of_request)
        checks = LayerChecks(self._shape, self._device, len(rows), end - start)
        return DenseStep(kept, rows, mask, checks)


class DenseStep:
    """`StepAttention` over whole rows."""

    def __init__(
        self, kept: Sequence[_Kept], rows: tuple[RowKey, ...], mask: torch.Tensor, checks: LayerChecks
    ) -> None:
        self._kept = kept
        self._rows = rows
        self._mask = mask
        self._checks = checks

    @property
    def rows(self) -> tuple[RowKey, ...]:
        return self._rows

    @property
    def query_start_tokens(self) -> int:
        return self._mask.shape[1] - self._mask.shape[0]

    @property
    def num_query_tokens(self) -> int:
        return self._mask.shape[0]

    def attend(self, layer_index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        self._checks.check(layer_index, query, key, value)
        start, end = self.query_start_tokens, self._mask.shape[1]
        attended = []
        first_row = 0
        for kept in self._kept:
            rows = slice(first_row, first_row + len(kept.rows))
            first_row = rows.stop
            keys, values = kept.tensor[layer_index]
            keys[:, :, start:end] = key[rows].transpose(1, 2)
            values[:, :, start:end] = value[rows].transpose(1, 2)
            attended.append(masked_attention(query[rows], keys[:, :, :end], values[:, :, :end], self._mask))
        self._checks.mark(layer_index)
        if self._checks.complete:
            for kept in self._kept:
                kept.first_step_done = True
        return attended[0] if len(attended) == 1 else torch.cat(attended)


def _by_request(rows: tuple[RowKey, ...]) -> dict[str, tuple[RowKey, ...]]:
    requests: dict[str, tuple[RowKey, ...]] = {}
    for request_id, of_request in groupby(rows, key=lambda row: row.request_id):
        if request_id in requests:
            raise PagedAttentionError(f"the rows of request {request_id!r} do not stand side by side: {list(rows)}")
        requests[request_id] = tuple(of_request)
    return requests
