# SPDX-License-Identifier: Apache-2.0
"""What a step's outputs look like, without their content: a decode phase brings the same form again and again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from omni_core.backend.memory import aligned_nbytes
from omni_core.prefix_cache.task import RecordPart, StagedRows, WriteSchedule

_MAX_FORMS = 64
"""Forms that are remembered: prefills bring ever new ones."""

_FormKey = tuple[Any, ...]


class TokenSpec(NamedTuple):
    """An output with one row per token."""

    key: str
    stored: bool
    schedule: WriteSchedule
    """When stored rows must have left the device."""


class PagePlaces(NamedTuple):
    """Where the rows of one form lie in one staging slot: each step of the form that uses the slot puts them there."""

    immediate: tuple[int, ...]
    """The form's values that cross with the page, as indices; the others are deferred."""
    clones: tuple[torch.Tensor, ...]
    """For each of these a view of the snapshot buffer."""
    device_part: torch.Tensor
    """The snapshot buffer's bytes that cross, uint8."""
    host_part: torch.Tensor
    """The same bytes of the page."""
    staged: tuple[StagedRows, ...]
    """Views of the page."""
    stored: tuple[StagedRows, ...]
    """Of these, the ones that go into the pool with the page."""
    immediate_keys: frozenset[str]
    """Their keys."""
    deferred_parts: tuple[RecordPart, ...]
    """Where the deferred values lie in their record."""
    deferred_start: int
    """The record's first byte of the page."""


class StepForm:
    """The outputs with a row per token of one kind of step. Engine thread only."""

    __slots__ = ("deferrable", "nbytes", "places", "requires_grad", "stored_keys", "values")

    def __init__(self, values: tuple[TokenSpec, ...], rows: tuple[torch.Tensor, ...]) -> None:
        """`rows` are those of one step of this form, padding rows cut off."""
        self.values = values
        self.stored_keys = frozenset(value.key for value in values if value.stored)
        self.nbytes = sum(aligned_nbytes(tensor.nbytes) for tensor in rows)
        self.requires_grad = any(tensor.requires_grad for tensor in rows)
        self.places: dict[tuple[int, bool], PagePlaces] = {}
        """Staging slot index, and whether rows are deferred → places, once a step of the form was recorded so."""
        self.deferrable: tuple[tuple[int, ...], int] | None = None
        """Values that may be deferred, as indices, and their bytes; `None`: nobody has asked yet."""


class KnownForms:
    """Forms whose outputs were understood, checked and stored before. Engine thread only."""

    def __init__(self) -> None:
        self._forms: dict[_FormKey, StepForm] = {}

    def find(self, key: _FormKey | None) -> StepForm | None:
        """The form with this key, if a step of it was saved."""
        return None if key is None else self._forms.get(key)

    def remember(self, key: _FormKey, form: StepForm) -> None:
        """A step of this form was saved: its keys have rows in the pool, its devices are right."""
        if len(self._forms) == _MAX_FORMS:
            del self._forms[next(iter(self._forms))]
        self._forms[key] = form


def form_key(hidden: torch.Tensor | None, outputs: Mapping[str, Any], counts: tuple[int, int, int]) -> _FormKey | None:
    """Everything by which a step is understood but the values; `None` if an output is no tensor. Changes nothing.

    Args:
        hidden: the step's hidden rows.
        outputs: its further outputs.
        counts: tokens, tokens with padding, requests.
    """
    parts: list[Any] = [counts]
    if hidden is not None:
        parts += (hidden.shape, hidden.dtype, hidden.device, hidden.requires_grad)
    for key, value in outputs.items():
        if not isinstance(value, torch.Tensor):
            return None
        parts += (key, value.shape, value.dtype, value.device, value.requires_grad)
    return tuple(parts)
