# SPDX-License-Identifier: Apache-2.0
"""What a cache has to make of each output, by the rules of `ModelCachePolicy`: stored rows, or a share passed on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from omni_core.prefix_cache.leftovers import map_leaves
from omni_core.prefix_cache.policy import ModelCachePolicy
from omni_core.testing.model_check.calls import ModelForward


class OutputRules:
    """Follows one stage's forwards, each to be given to `stored_keys` and then, if it was saved, to `saved`.

    Args:
        policy: the model's.
    """

    def __init__(self, policy: ModelCachePolicy) -> None:
        self._policy = policy
        self._is_rows: dict[str, bool] = {}
        """Undeclared outputs that a saved forward decided."""

    def stored_keys(self, forward: ModelForward) -> frozenset[str]:
        """Flattened names of the outputs whose rows a cache must store, hidden states aside."""
        return frozenset(
            name for name in forward.outputs if self._has_rows(forward, name) and forward.has_row_per_token(name)
        )

    def saved(self, forward: ModelForward) -> None:
        """The forward's step was saved: what it decided holds from now on."""
        for name in forward.outputs:
            if not self._is_declared(name) and _decides(forward, name):
                self._is_rows.setdefault(name, forward.has_row_per_token(name))

    def shares(self, forward: ModelForward) -> list[dict[str, Any]]:
        """For each run, what its request must get of the outputs that are not stored: copies, made now."""
        stored = self.stored_keys(forward)
        return [
            {
                name: map_leaves(self._share(forward, name, value, index), _copied)
                for name, value in forward.outputs.items()
                if name not in stored
            }
            for index in range(len(forward.runs))
        ]

    def _has_rows(self, forward: ModelForward, name: str) -> bool:
        if self._is_declared(name):
            return name not in self._policy.request_keys
        known = self._is_rows.get(name)
        return known if known is not None else _decides(forward, name)

    def _is_declared(self, name: str) -> bool:
        policy = self._policy
        return name in policy.token_keys or name in policy.request_keys or name in policy.deferred_keys

    def _share(self, forward: ModelForward, name: str, value: Any, index: int) -> Any:
        count = len(forward.runs)
        if isinstance(value, list | tuple):
            return value[index] if len(value) == count else value
        if name in self._policy.request_keys:
            entries = isinstance(value, torch.Tensor | np.ndarray) and value.ndim > 0 and value.shape[0] == count
            return value[index] if entries else value
        undecided = not self._is_declared(name) and name not in self._is_rows and not _decides(forward, name)
        if undecided and forward.has_row_per_token(name):
            return forward.rows_of(index, value)
        return value


def same_value(given: Any, expected: Any) -> bool:
    """Whether two leftovers are equal, element by element; lists and tuples are the same."""
    if isinstance(expected, torch.Tensor):
        return (
            isinstance(given, torch.Tensor)
            and given.dtype == expected.dtype
            and given.shape == expected.shape
            and _bytes_of(given) == _bytes_of(expected)
        )
    if isinstance(expected, np.ndarray):
        return isinstance(given, np.ndarray) and given.dtype == expected.dtype and bool(np.array_equal(given, expected))
    if isinstance(expected, Mapping):
        return (
            isinstance(given, Mapping)
            and set(given) == set(expected)
            and all(same_value(given[name], value) for name, value in expected.items())
        )
    if isinstance(expected, Sequence) and not isinstance(expected, str | bytes):
        return (
            isinstance(given, Sequence)
            and len(given) == len(expected)
            and all(same_value(*pair) for pair in zip(given, expected, strict=True))
        )
    return bool(given == expected)


def _decides(forward: ModelForward, name: str) -> bool:
    value = forward.outputs[name]
    rowed = isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() > 0
    return rowed and forward.num_tokens > 1 and forward.num_tokens != len(forward.runs)


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().clone(memory_format=torch.contiguous_format)
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
