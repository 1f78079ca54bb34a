# SPDX-License-Identifier: Apache-2.0
"""What a check can have to say about a model's outputs, in the author's terms."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Severity(Enum):
    """How bad it is."""

    WRONG = "wrong"
    """Rows would be missing, misplaced or not what the model computes; or nothing could be checked."""
    ADVICE = "advice"
    """Works as it stands; the text says what to know about it."""


class Problem(Enum):
    """What is the matter."""

    TOKENS_ON_OTHER_DIMENSION = "tokens on another dimension than the first"
    NOT_ONE_ROW_PER_TOKEN = "declared as rows, but has no row per token"
    NOT_ONE_ENTRY_PER_REQUEST = "declared as entries, but has no entry per request"
    ROWS_CHANGE_FORM = "rows change their width, rank or dtype"
    NO_ROWS_TO_SPEAK_OF = "rows hold no element"
    UNDECLARED_AND_AMBIGUOUS = "undeclared and ambiguous"
    UNDECLARED = "undeclared"
    DECLARED_NEVER_SEEN = "declared, but never came"
    COMES_SOMETIMES = "comes in some forwards only"
    ROWS_IN_A_LIST = "rows of tokens in a list"
    NOT_A_FUNCTION_OF_THE_PREFIX = "not a function of the token prefix and the position"
    NOTHING_TO_HIT = "no prefix hit was possible"
    DIFFERS_WITHOUT_CACHE = "other rows than without a cache"
    DELIVERY_FAILED = "the cache did not deliver what the model computed"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing found."""

    severity: Severity
    problem: Problem
    key: str | None
    """The output's flattened name; `None`: not about one output."""
    what: str
    """What was seen, with shapes and places."""
    remedy: str
    """What to do about it."""

    def __str__(self) -> str:
        about = "" if self.key is None else f" {self.key!r}:"
        return f"{self.severity.value}:{about} {self.problem.value}. {self.what} {self.remedy}"


def wrong(problem: Problem, key: str | None, what: str, remedy: str) -> Finding:
    """A finding that has to be put right."""
    return Finding(Severity.WRONG, problem, key, what, remedy)


def advice(problem: Problem, key: str | None, what: str, remedy: str) -> Finding:
    """A finding to know about."""
    return Finding(Severity.ADVICE, problem, key, what, remedy)
