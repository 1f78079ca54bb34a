# SPDX-License-Identifier: Apache-2.0
"""Outputs without a row per token: copied with the step whatever their nesting, and shared out per request."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from omni_core.prefix_cache.step_inputs import LeftoverShare, LeftoverValue


@dataclass(frozen=True, slots=True)
class StagedLeftover:
    """A leftover whose tensors lie in the step's page."""

    key: str
    share: LeftoverShare
    value: Any
    """A page view, or lists, tuples and mappings of page views and foreign values copied at save."""
    element_rows: tuple[int, ...] | None = None
    """Set if `value` is one page view over the concatenated elements of a list: their row counts."""

    def detached(self) -> Any:
        """The value, independent of the page: tensors cloned, a concatenated list split again. Once per delivery."""
        if self.element_rows is not None:
            return torch.split(self.value.clone(), list(self.element_rows))
        return map_leaves(self.value, lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf)


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """A copy of nested lists, tuples and mappings with every leaf changed."""
    if isinstance(value, tuple):
        return tuple(map_leaves(each, change) for each in value)
    if isinstance(value, list):
        return [map_leaves(each, change) for each in value]
    if isinstance(value, Mapping):
        return {name: map_leaves(each, change) for name, each in value.items()}
    return change(value)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors among the leaves of nested lists, tuples and mappings."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [tensor for each in value for tensor in tensors_of(each)]


def stage_leftover(leftover: LeftoverValue, stage: Callable[[tuple[torch.Tensor, ...]], int]) -> StagedLeftover:
    """Register a leftover's tensors with `stage`; the result holds their numbers in place of page views.

    A list with an element per request is registered as one block where its elements can be concatenated: the engine
    thread has no operation per request. Foreign objects are copied one level deep; tensors inside them are not seen.
    """
    value = leftover.value
    if isinstance(value, tuple) and _can_concatenate(value):
        block = StagedTensor(stage(value))
        return StagedLeftover(leftover.key, leftover.share, block, tuple(each.shape[0] for each in value))

    def staged(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return StagedTensor(stage((leaf,)))
        return leaf.copy() if isinstance(leaf, np.ndarray) else copy.copy(leaf)

    return StagedLeftover(leftover.key, leftover.share, map_leaves(value, staged))


@dataclass(frozen=True, slots=True)
class StagedTensor:
    """Stands for a tensor that will lie in the page."""

    number: int


def with_views(leftover: StagedLeftover, views: list[torch.Tensor]) -> StagedLeftover:
    """The leftover with page views in place of their numbers."""
    value = map_leaves(leftover.value, lambda leaf: views[leaf.number] if isinstance(leaf, StagedTensor) else leaf)
    return StagedLeftover(leftover.key, leftover.share, value, leftover.element_rows)


def _can_concatenate(values: tuple[Any, ...]) -> bool:
    first = values[0] if values else None
    if not isinstance(first, torch.Tensor) or first.dim() == 0:
        return False
    return all(
        isinstance(each, torch.Tensor)
        and each.dim() == first.dim()
        and each.shape[1:] == first.shape[1:]
        and each.dtype == first.dtype
        and each.device == first.device
        for each in values
    )
