# SPDX-License-Identifier: Apache-2.0
"""What every owner refuses of a layer's tensors before it keeps anything."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from omni_core.diffusion_kv.attention.owner import KVShape, RowKey
from omni_core.diffusion_kv.errors import PagedAttentionError


class LayerChecks:
    """One forward's layers: each once, each of the owner's shape, dtype and device."""

    __slots__ = ("_attended", "_device", "_kv_shape", "_query_shape", "_shape")

    def __init__(self, shape: KVShape, device: torch.device, num_rows: int, num_query_tokens: int) -> None:
        self._shape = shape
        self._device = device
        self._query_shape = (num_rows, num_query_tokens, shape.num_query_heads, shape.head_size)
        self._kv_shape = (num_rows, num_query_tokens, shape.num_kv_heads, shape.head_size)
        self._attended = [False] * shape.num_layers

    @property
    def complete(self) -> bool:
        """Whether every layer was attended."""
        return all(self._attended)

    def check(self, layer_index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Check one layer's call.

        Raises:
            PagedAttentionError: the layer is out of range or was attended before, or a tensor does not fit.
        """
        if not 0 <= layer_index < self._shape.num_layers:
            raise PagedAttentionError(f"layer {layer_index}: the keys and values of {self._shape.num_layers} are kept")
        if self._attended[layer_index]:
            raise PagedAttentionError(f"layer {layer_index} attends a second time in one forward")
        for name, tensor, wanted in (
            ("query", query, self._query_shape),
            ("key", key, self._kv_shape),
            ("value", value, self._kv_shape),
        ):
            if tensor.shape != wanted:
                raise PagedAttentionError(
                    f"layer {layer_index}: {name} has the shape {tuple(tensor.shape)}, and this forward's is {wanted}"
                )
            if tensor.dtype != self._shape.dtype:
                raise PagedAttentionError(
                    f"layer {layer_index}: {name} is {tensor.dtype}, and keys and values are kept as "
                    f"{self._shape.dtype}"
                )
            if tensor.device != self._device:
                raise PagedAttentionError(
                    f"layer {layer_index}: {name} lies on {tensor.device}, and keys and values on {self._device}"
                )

    def mark(self, layer_index: int) -> None:
        """The layer was attended."""
        self._attended[layer_index] = True


def check_rows(rows: Sequence[RowKey]) -> tuple[RowKey, ...]:
    """The rows of a forward, once they are found to be some, and different ones.

    Raises:
        PagedAttentionError: none, or one twice.
    """
    if not rows:
        raise PagedAttentionError("a forward without rows")
    if len(set(rows)) != len(rows):
        raise PagedAttentionError(f"a row stands twice in one forward: {list(rows)}")
    return tuple(rows)
