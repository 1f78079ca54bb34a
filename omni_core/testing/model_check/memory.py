# SPDX-License-Identifier: Apache-2.0
"""Where a forward's outputs lie while the cache takes them: in memory that is overwritten as soon as it has."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from omni_core.prefix_cache.leftovers import map_leaves
from omni_core.testing.fake_model import GARBAGE_BYTE


class OutputMemory:
    """Copies a forward's outputs to where an engine would have them, and spoils them afterwards. Engine thread only.

    With a captured graph, rows lie in the graph's own buffers, behind them the padding rows. Either way the bytes are
    overwritten once the step is saved: what is delivered later can only come from the cache's own copy.

    Args:
        max_num_tokens_padded: rows of a graph's buffers; `None`: there is no graph, each forward has fresh tensors.
    """

    def __init__(self, max_num_tokens_padded: int | None) -> None:
        self._max_num_tokens_padded = max_num_tokens_padded
        self._buffers: dict[tuple[str, tuple[int, ...], torch.dtype], torch.Tensor] = {}
        self._placed: list[torch.Tensor] = []

    def placed_rows(self, name: str, rows: torch.Tensor, num_tokens_padded: int) -> torch.Tensor:
        """A copy of `rows` `(num_tokens, …)`, padded to `num_tokens_padded` rows if there is a graph."""
        if self._max_num_tokens_padded is None:
            return self._placed_fresh(rows)
        shape = (self._max_num_tokens_padded, *rows.shape[1:])
        buffer = self._buffers.setdefault((name, shape, rows.dtype), torch.empty(shape, dtype=rows.dtype))
        view = buffer[:num_tokens_padded]
        _fill_with_garbage(view)
        view[: rows.shape[0]] = rows
        self._placed.append(view)
        return view

    def placed_outputs(
        self, nested: Mapping[str, Any], with_rows: Collection[str], num_tokens_padded: int
    ) -> dict[str, Any]:
        """A copy of a model's further outputs; those named in `with_rows`, by flattened name, are padded."""

        def place(name: str, value: Any) -> Any:
            if isinstance(value, torch.Tensor) and name in with_rows:
                return self.placed_rows(name, value, num_tokens_padded)
            return map_leaves(value, self._placed_leaf)

        return _map_named(nested, place, "")

    def spoil(self) -> None:
        """Overwrite everything placed since the last call."""
        for tensor in self._placed:
            _fill_with_garbage(tensor)
        self._placed.clear()

    def _placed_leaf(self, leaf: Any) -> Any:
        return self._placed_fresh(leaf) if isinstance(leaf, torch.Tensor) else leaf

    def _placed_fresh(self, tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.detach().clone(memory_format=torch.contiguous_format)
        self._placed.append(copy)
        return copy


def _map_named(nested: Mapping[str, Any], change: Callable[[str, Any], Any], prefix: str) -> dict[str, Any]:
    return {
        name: _map_named(value, change, f"{prefix}{name}.")
        if isinstance(value, Mapping)
        else change(f"{prefix}{name}", value)
        for name, value in nested.items()
    }


def _fill_with_garbage(tensor: torch.Tensor) -> None:
    if tensor.numel():
        tensor.reshape(-1).view(torch.uint8).fill_(GARBAGE_BYTE)
