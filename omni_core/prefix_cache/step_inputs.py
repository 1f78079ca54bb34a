# SPDX-License-Identifier: Apache-2.0
"""What a step brought: outputs with a row per token are stored, others are passed on, malformed ones refused."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import torch

from omni_core.prefix_cache.block_pool import RowSpec
from omni_core.prefix_cache.config import HIDDEN_KEY, PrefixCacheConfig
from omni_core.prefix_cache.errors import KeyShapeChangedError, LayoutMismatchError
from omni_core.prefix_cache.policy import ModelCachePolicy
from omni_core.prefix_cache.step_form import KnownForms, StepForm, TokenSpec, form_key
from omni_core.prefix_cache.task import WriteSchedule

logger = logging.getLogger(__name__)


class KeyKind(Enum):
    """How an output is understood."""

    TOKEN = "token"
    """One row per token: stored, joined on a hit."""
    LEFTOVER = "leftover"
    """Anything else: passed on, never stored."""


class LeftoverShare(Enum):
    """What each request gets of a leftover."""

    SLICE = "slice"
    """The rows of its own tokens (a tensor that has a row per token and is not stored)."""
    ENTRY = "entry"
    """Its own index of the first dimension."""
    ELEMENT = "element"
    """Its own element of a list."""
    WHOLE = "whole"
    """The whole value, first dimension untouched."""


@dataclass(frozen=True, slots=True)
class LeftoverValue:
    """An output that is passed on."""

    key: str
    value: Any
    share: LeftoverShare


class StepInputs(NamedTuple):
    """One step's outputs, understood."""

    form: StepForm
    rows: tuple[torch.Tensor, ...]
    """For each of the form's values `(num_tokens, *trailing)`, padding rows cut off."""
    leftovers: tuple[LeftoverValue, ...]
    decided: Mapping[str, KeyKind]
    """Keys this step decides; they count once the step is saved."""
    form_key: tuple[Any, ...] | None
    is_known: bool
    """A step of this form was saved before: its keys are stored and its devices were checked."""

    def token_values(self) -> Iterator[tuple[TokenSpec, torch.Tensor]]:
        """Each value with its rows."""
        return zip(self.form.values, self.rows, strict=True)


_NONE_DECIDED: Mapping[str, KeyKind] = {}


class OutputClassifier:
    """Understands a step's outputs and remembers what earlier steps decided. Engine thread only."""

    def __init__(self, config: PrefixCacheConfig, policy: ModelCachePolicy) -> None:
        self._config = config
        self._policy = policy
        self._kinds: dict[str, KeyKind] = {}
        self._specs: dict[str, RowSpec] = {
            HIDDEN_KEY: RowSpec((config.hidden_size,), config.hidden_dtype),
        }
        self._contradicted: set[str] = set()
        self._forms = KnownForms()

    def understand(
        self,
        hidden: torch.Tensor | None,
        outputs: Mapping[str, Any],
        num_tokens: int,
        num_tokens_padded: int,
        num_reqs: int,
    ) -> StepInputs:
        """Sort a step's outputs. Changes nothing.

        Raises:
            LayoutMismatchError: hidden rows are missing, or fit neither row count.
            KeyShapeChangedError: a stored key came with another rank, width or dtype.
        """
        if num_tokens_padded < num_tokens:
            raise LayoutMismatchError(
                f"num_tokens_padded={num_tokens_padded} is smaller than num_tokens_unpadded={num_tokens}; padding rows "
                "come after the real ones"
            )
        key = form_key(hidden, outputs, (num_tokens, num_tokens_padded, num_reqs))
        form = self._forms.find(key)
        if form is not None:
            given = outputs.values() if hidden is None else (hidden, *outputs.values())
            rows = tuple([_real_rows(value, num_tokens) for value in given])
            return StepInputs(form, rows, (), _NONE_DECIDED, key, is_known=True)
        return self._understand_anew(hidden, outputs, num_tokens, num_tokens_padded, num_reqs, key)

    def _understand_anew(
        self,
        hidden: torch.Tensor | None,
        outputs: Mapping[str, Any],
        num_tokens: int,
        num_tokens_padded: int,
        num_reqs: int,
        key_of_form: tuple[Any, ...] | None,
    ) -> StepInputs:
        specs: list[TokenSpec] = []
        rows_of: list[torch.Tensor] = []
        leftovers: list[LeftoverValue] = []
        decided: dict[str, KeyKind] = {}
        stores_hidden = self._policy.needs_full_hidden_states
        if hidden is not None:
            rows_of.append(self._hidden(hidden, num_tokens, num_tokens_padded))
            specs.append(TokenSpec(HIDDEN_KEY, stores_hidden, WriteSchedule.JOIN_NEXT_STEP))
        elif stores_hidden:
            raise LayoutMismatchError(
                "hidden states are missing; pass them, or register a policy with needs_full_hidden_states=False"
            )
        for key, value in flatten(outputs).items():
            if key == HIDDEN_KEY:
                raise LayoutMismatchError(f"{HIDDEN_KEY!r} is the hidden states' own key; name the output differently")
            rowed = isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() > 0
            per_token = rowed and value.shape[0] in (num_tokens, num_tokens_padded)
            kind = self._kind(key, rowed, per_token, num_tokens, num_reqs, decided)
            if kind is KeyKind.TOKEN and per_token:
                rows = _real_rows(value, num_tokens)
                self._check_spec(key, rows)
                deferred = key in self._policy.deferred_keys
                schedule = WriteSchedule.JOIN_ON_FINISH if deferred else WriteSchedule.JOIN_NEXT_STEP
                rows_of.append(rows)
                specs.append(TokenSpec(key, True, schedule))
            else:
                leftovers.append(self._leftover(key, value, kind, per_token, num_tokens, num_reqs))
        form = StepForm(tuple(specs), tuple(rows_of))
        return StepInputs(form, tuple(rows_of), tuple(leftovers), decided, key_of_form, is_known=False)

    def confirm(self, inputs: StepInputs) -> None:
        """The step was saved: what it decided holds from now on."""
        if inputs.is_known:
            return
        self._kinds.update(inputs.decided)
        for value, rows in inputs.token_values():
            if value.stored and value.key not in self._specs:
                self._specs[value.key] = RowSpec(tuple(rows.shape[1:]), rows.dtype)
        if inputs.form_key is not None and not inputs.leftovers:  # of what is passed on, the values matter too
            self._forms.remember(inputs.form_key, inputs.form)

    def _hidden(self, hidden: torch.Tensor, num_tokens: int, num_tokens_padded: int) -> torch.Tensor:
        if hidden.dim() != 2 or hidden.shape[0] not in (num_tokens, num_tokens_padded):
            raise LayoutMismatchError(
                f"hidden states have shape {tuple(hidden.shape)}; expected ({num_tokens} or {num_tokens_padded}, "
                f"hidden_size={self._config.hidden_size})"
            )
        rows = _real_rows(hidden, num_tokens)
        self._check_spec(HIDDEN_KEY, rows)
        return rows

    def _kind(
        self,
        key: str,
        rowed: bool,
        per_token: bool,
        num_tokens: int,
        num_reqs: int,
        decided: dict[str, KeyKind],
    ) -> KeyKind | None:
        if key in self._policy.token_keys or key in self._policy.deferred_keys:
            kind: KeyKind | None = KeyKind.TOKEN
        elif key in self._policy.request_keys:
            return KeyKind.LEFTOVER
        else:
            kind = self._kinds.get(key)
            if kind is None and rowed and num_tokens > 1 and num_tokens != num_reqs:
                # With one token per request a row per token and an entry per request look alike.
                kind = decided[key] = KeyKind.TOKEN if per_token else KeyKind.LEFTOVER
        if kind is not None and rowed and (kind is KeyKind.TOKEN) is not per_token and num_tokens != num_reqs:
            self._report_contradiction(key, kind, num_tokens)
        return kind

    def _report_contradiction(self, key: str, kind: KeyKind, num_tokens: int) -> None:
        if key in self._contradicted:
            return
        self._contradicted.add(key)
        understood = "a row per token" if kind is KeyKind.TOKEN else "no row per token"
        logger.error(
            "key %r was understood to have %s, but a step of %d tokens brought it in another form; that step's value "
            "is passed on unstored (logged once). Declare the key in the model's policy",
            key,
            understood,
            num_tokens,
        )

    def _check_spec(self, key: str, rows: torch.Tensor) -> None:
        known = self._specs.get(key)
        if known is not None and (known.trailing_shape != rows.shape[1:] or known.dtype != rows.dtype):
            setting = f"hidden_size={self._config.hidden_size}, hidden_dtype={self._config.hidden_dtype}"
            raise KeyShapeChangedError(
                f"key {key!r} came with rows {tuple(rows.shape[1:])} of {rows.dtype}, but has rows "
                f"{known.trailing_shape} of {known.dtype} by {setting if key == HIDDEN_KEY else 'its first step'}; "
                "a key keeps its rank, width and dtype"
            )

    def _leftover(
        self, key: str, value: Any, kind: KeyKind | None, per_token: bool, num_tokens: int, num_reqs: int
    ) -> LeftoverValue:
        if isinstance(value, list | tuple):
            share = LeftoverShare.ELEMENT if len(value) == num_reqs else LeftoverShare.WHOLE
            return LeftoverValue(key, tuple(value), share)
        is_rowed = isinstance(value, torch.Tensor | np.ndarray) and value.ndim > 0
        if key in self._policy.request_keys:
            share = LeftoverShare.ENTRY if is_rowed and value.shape[0] == num_reqs else LeftoverShare.WHOLE
            return LeftoverValue(key, value, share)
        if per_token and kind is None:
            return LeftoverValue(key, _real_rows(value, num_tokens), LeftoverShare.SLICE)
        return LeftoverValue(key, value, LeftoverShare.WHOLE)


def _real_rows(value: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """The rows in front of graph padding; a view costs a torch operation, so none is made where there is no padding."""
    return value if value.shape[0] == num_tokens else value[:num_tokens]


def flatten(outputs: Mapping[str, Any]) -> dict[str, Any]:
    """Nested mappings as one level, names joined with dots: `{"codes": {"audio": x}}` becomes `codes.audio`.

    Raises:
        LayoutMismatchError: two outputs come to the same name.
    """
    flat: dict[str, Any] = {}
    _flatten_into(flat, outputs, "")
    return flat


def _flatten_into(flat: dict[str, Any], outputs: Mapping[str, Any], prefix: str) -> None:
    for name, value in outputs.items():
        full_name = f"{prefix}{name}"
        if isinstance(value, Mapping):
            _flatten_into(flat, value, f"{full_name}.")
        elif full_name in flat:
            raise LayoutMismatchError(
                f"two outputs come to the name {full_name!r}: one nested, one with a dot; rename one"
            )
        else:
            flat[full_name] = value
