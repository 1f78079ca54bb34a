# SPDX-License-Identifier: Apache-2.0
"""What form each output had in every forward, held against what the policy says it is. Looks at no value."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from omni_core.prefix_cache.config import HIDDEN_KEY
from omni_core.prefix_cache.policy import ModelCachePolicy
from omni_core.testing.model_check.calls import ModelForward
from omni_core.testing.model_check.findings import Finding, Problem, advice, wrong

_FEW = 3


@dataclass(frozen=True, slots=True)
class Sighting:
    """One output in one forward."""

    num_tokens: int
    num_requests: int
    shape: tuple[int, ...] | None
    """Of a tensor; `None` for anything else."""
    dtype: torch.dtype | None
    length: int | None
    """Of a list or tuple."""
    rows_in_elements: bool
    """It is a list with a tensor per request, each with a row for each token of its request."""
    type_name: str

    @property
    def per_token(self) -> bool:
        """Whether the first dimension is the token count."""
        return bool(self.shape) and self.shape is not None and self.shape[0] == self.num_tokens

    @property
    def per_request(self) -> bool:
        """Whether the first dimension, or the list's length, is the request count."""
        size = self.length if self.shape is None else (self.shape or (None,))[0]
        return size == self.num_requests

    @property
    def decides(self) -> bool:
        """Whether rows of tokens and entries of requests could not be confused in that forward."""
        return self.num_tokens > 1 and self.num_tokens != self.num_requests

    def __str__(self) -> str:
        form = f"a {self.type_name}" if self.shape is None else f"{self.shape} of {self.dtype}"
        if self.length is not None:
            form = f"a {self.type_name} of {self.length}"
        return f"{form} for {counted(self.num_tokens, 'token')} of {counted(self.num_requests, 'request')}"


@dataclass(slots=True)
class OutputForms:
    """Every form of every output so far. Given each forward by `saw`."""

    policy: ModelCachePolicy
    num_forwards: int = 0
    sightings: dict[str, list[Sighting]] = field(default_factory=dict)
    """By flattened name, one per forward that brought the output."""
    row_bytes: int = 0
    """Most bytes per row that the further outputs of a forward took."""
    hidden_forms: set[tuple[int, torch.dtype]] = field(default_factory=set)
    """Widths and dtypes of hidden states."""

    def saw(self, forward: ModelForward) -> None:
        """Take in a forward."""
        self.num_forwards += 1
        self.row_bytes = max(self.row_bytes, forward.row_bytes)
        if forward.hidden is not None:
            self.hidden_forms.add((forward.hidden.shape[1], forward.hidden.dtype))
        for name, value in forward.outputs.items():
            self.sightings.setdefault(name, []).append(_sighting(forward, value))

    def has_rows(self, name: str) -> bool:
        """Whether the output is one row per token, as declared or as its forms show."""
        if name in self.policy.request_keys:
            return False
        if name in self.policy.token_keys | self.policy.deferred_keys:
            return True
        seen = [sighting for sighting in self.sightings[name] if sighting.decides]
        return bool(seen) and all(sighting.per_token for sighting in seen)

    def findings(self) -> list[Finding]:
        """What the forms alone show, by name of the output."""
        found = self._hidden_findings()
        for name in sorted(self._declared() | set(self.sightings)):
            found.extend(self._findings_of(name))
        return found

    def _declared(self) -> frozenset[str]:
        return self.policy.token_keys | self.policy.deferred_keys | self.policy.request_keys

    def _hidden_findings(self) -> list[Finding]:
        if len(self.hidden_forms) < 2:
            return []
        forms = ", ".join(f"{width} wide of {dtype}" for width, dtype in sorted(self.hidden_forms, key=str))
        return [
            wrong(Problem.ROWS_CHANGE_FORM, HIDDEN_KEY, f"Hidden rows were {forms}.", "Return one width and dtype.")
        ]

    def _findings_of(self, name: str) -> list[Finding]:
        seen = self.sightings.get(name, [])
        if not seen:
            return [self._never_seen(name)]
        if name in self.policy.request_keys:
            return self._entry_findings(name, seen)
        declared = name in self._declared()
        misplaced = self._tokens_elsewhere(name, seen, declared=declared)
        if misplaced is not None:
            return [misplaced]
        if declared:
            return self._row_findings(name, seen)
        return self._undeclared_findings(name, seen)

    def _never_seen(self, name: str) -> Finding:
        undeclared = sorted(set(self.sightings) - self._declared())
        like = difflib.get_close_matches(name, undeclared, 1)
        remedy = (
            f"The model returns {like[0]!r}, which is not declared: correct the name."
            if like
            else "Give prompts for which it comes, or take it out of the policy: nothing of it was checked."
        )
        came = ", ".join(map(repr, sorted(self.sightings))) or "none"
        what = f"No forward of {self.num_forwards} brought it; outputs that came: {came}."
        return wrong(Problem.DECLARED_NEVER_SEEN, name, what, remedy)

    def _tokens_elsewhere(self, name: str, seen: Sequence[Sighting], *, declared: bool) -> Finding | None:
        """Tokens lie on dimension 1 or later, in every forward, whatever its token count."""
        shapes = [sighting.shape for sighting in seen if sighting.shape]
        wide = [sighting for sighting in seen if sighting.num_tokens > 1]
        rows_somewhere = any(sighting.per_token and sighting.decides for sighting in seen)
        if len(shapes) < len(seen) or rows_somewhere or len({sighting.num_tokens for sighting in wide}) < 2:
            return None
        rank = min(map(len, shapes))
        places = [dim for dim in range(1, rank) if all(s.shape and s.shape[dim] == s.num_tokens for s in seen)]
        if not places:
            return None
        declaration = "" if declared else " It is not declared, so each request would be given the whole of it."
        return wrong(
            Problem.TOKENS_ON_OTHER_DIMENSION,
            name,
            f"It was {_shown(wide)}: tokens are on dimension {places[0]}, rows are told by dimension 0.{declaration}",
            f"Return `{name.rpartition('.')[2]}.movedim({places[0]}, 0)`, and declare it in token_keys.",
        )

    def _row_findings(self, name: str, seen: Sequence[Sighting]) -> list[Finding]:
        other = [sighting for sighting in seen if not sighting.per_token]
        if other:
            what = f"It was {_shown(other)}."
            if all(sighting.rows_in_elements for sighting in other):
                remedy = "Concatenate the list: rows of the requests one after the other, in one tensor."
            elif all(sighting.per_request for sighting in other):
                remedy = "It has an entry per request: declare it in request_keys."
            else:
                remedy = "Return a tensor whose first dimension is the token count, or do not declare it as rows."
            return [wrong(Problem.NOT_ONE_ROW_PER_TOKEN, name, what, remedy)]
        return self._form_findings(name, seen)

    def _form_findings(self, name: str, seen: Sequence[Sighting]) -> list[Finding]:
        """Of an output that has a row per token in every forward that brought it."""
        forms = {(tuple(sighting.shape or ())[1:], sighting.dtype) for sighting in seen}
        if len(forms) > 1:
            shown = "; ".join(f"{shape} of {dtype}" for shape, dtype in sorted(forms, key=str))
            what = f"Rows were {shown}."
            return [
                wrong(Problem.ROWS_CHANGE_FORM, name, what, "Return one shape and dtype per row, in every forward.")
            ]
        if any(0 in (sighting.shape or ())[1:] for sighting in seen):
            return [
                wrong(Problem.NO_ROWS_TO_SPEAK_OF, name, f"It was {_shown(seen)}.", "Leave it out while it is empty.")
            ]
        if len(seen) < self.num_forwards:
            what = f"It came in {len(seen)} of {self.num_forwards} forwards."
            remedy = "Rows behind a prefix hit read zeros where it had not come; `zero_ranges` says where."
            return [advice(Problem.COMES_SOMETIMES, name, what, remedy)]
        return []

    def _entry_findings(self, name: str, seen: Sequence[Sighting]) -> list[Finding]:
        other = [s for s in seen if not s.per_request and (s.shape or s.length is not None)]
        if not other:
            return []
        what = f"It was {_shown(other)}."
        if all(sighting.per_token for sighting in seen):
            remedy = "It has a row per token: declare it in token_keys, so that it is stored and joined."
            return [wrong(Problem.NOT_ONE_ENTRY_PER_REQUEST, name, what, remedy)]
        if len({(sighting.shape, sighting.length) for sighting in seen}) == 1:
            remedy = "Each request is given the whole of it, but where there are just so many requests, one entry each."
            return [advice(Problem.NOT_ONE_ENTRY_PER_REQUEST, name, what, remedy)]
        remedy = "Return one entry per request of the forward, in their order."
        return [wrong(Problem.NOT_ONE_ENTRY_PER_REQUEST, name, what, remedy)]

    def _undeclared_findings(self, name: str, seen: Sequence[Sighting]) -> list[Finding]:
        if not any(sighting.shape for sighting in seen):  # lists, numbers, tensors without a dimension
            return self._list_findings(name, seen)
        rows = [sighting for sighting in seen if sighting.decides and sighting.per_token]
        other = [sighting for sighting in seen if sighting.decides and not sighting.per_token]
        if rows and not other:
            what = "It has a row per token, as its forms show; before a forward shows it, its rows are not stored."
            return [
                advice(Problem.UNDECLARED, name, what, "Declare it in token_keys."),
                *self._form_findings(name, seen),
            ]
        if rows or not other:
            what = f"It was {_shown([*rows, *other] or seen)}."
            reason = "Once it has a row per token, once not." if rows else "No forward tells rows from entries."
            remedy = f"{reason} Declare it in token_keys or request_keys."
            return [wrong(Problem.UNDECLARED_AND_AMBIGUOUS, name, what, remedy)]
        if all(sighting.per_request for sighting in seen):
            what = f"It was {_shown(other)}: an entry per request, but each request is given the whole of it."
            return [wrong(Problem.UNDECLARED_AND_AMBIGUOUS, name, what, "Declare it in request_keys.")]
        what = f"It was {_shown(other)}: each request is given the whole of it."
        remedy = "In a forward of just so many tokens it would be taken for rows; put it into a list to rule that out."
        return [advice(Problem.UNDECLARED, name, what, remedy)]

    def _list_findings(self, name: str, seen: Sequence[Sighting]) -> list[Finding]:
        longest = max(seen, key=lambda sighting: sighting.num_tokens)
        if not all(sighting.rows_in_elements for sighting in seen) or longest.num_tokens == longest.num_requests:
            return []
        what = f"It was {_shown(seen)}, with a row per token in each element."
        remedy = (
            "A list is passed on with its step and never stored: behind a prefix hit those rows are missing. "
            "If its consumer needs all rows, concatenate it and declare it in token_keys."
        )
        return [advice(Problem.ROWS_IN_A_LIST, name, what, remedy)]


def _sighting(forward: ModelForward, value: Any) -> Sighting:
    runs = forward.runs
    is_list = isinstance(value, list | tuple)
    rows_in_elements = (
        is_list
        and len(value) == len(runs)
        and all(
            isinstance(element, torch.Tensor) and element.dim() > 0 and element.shape[0] == run.num_tokens
            for element, run in zip(value, runs, strict=True)
        )
    )
    return Sighting(
        forward.num_tokens,
        len(runs),
        tuple(value.shape) if isinstance(value, torch.Tensor) else None,
        value.dtype if isinstance(value, torch.Tensor) else None,
        len(value) if is_list else None,
        rows_in_elements,
        type(value).__name__,
    )


def counted(number: int, what: str) -> str:
    """Such as `1 token` or `3 tokens`."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _shown(sightings: Sequence[Sighting]) -> str:
    """A few of them, one for each form."""
    by_form = {(s.shape, s.dtype, s.length, s.num_tokens): s for s in sightings}
    return "; ".join(str(sighting) for sighting in list(by_form.values())[:_FEW])
