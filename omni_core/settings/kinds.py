# SPDX-License-Identifier: Apache-2.0
"""Kinds of values: the rule each follows, how it is read from text, and how a JSON schema says it."""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from enum import Enum
from typing import Any, Generic, TypeVar

T = TypeVar("T")

MAX_TIMEOUT_S = 31_536_000
"""A year. Python's locks cannot wait for much longer, and nobody means to."""

_FLAG_WORDS = {"true": True, "1": True, "false": False, "0": False}
_UNIT_BYTES = {"b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_SIZE_PATTERN = "^ *([0-9]+) *([bB]|[kKmMgGtT][iI][bB])? *$"
_SIZE = re.compile(_SIZE_PATTERN)
_WHOLE_NUMBER = re.compile(r"\s*[+-]?[0-9]+\s*")
_LIMIT = 1 << 63
"""Numbers stay below it: the tables and the operating system's calls hold 64 bits."""
_MAX_DIGITS = 20


class NotOfKindError(ValueError):
    """A value breaks the rule of its kind; the text follows the value."""


class Kind(ABC, Generic[T]):
    """What values a setting takes. Immutable; any thread."""

    @property
    @abstractmethod
    def rule(self) -> str:
        """What a value must be, to follow "must be"."""

    @abstractmethod
    def from_value(self, value: Any) -> T:
        """The setting's value from a JSON or TOML value.

        Raises:
            NotOfKindError: the value breaks the rule.
        """

    @abstractmethod
    def from_text(self, text: str) -> T:
        """The setting's value from an environment variable or a flag.

        Raises:
            NotOfKindError: the text breaks the rule.
        """

    @abstractmethod
    def json_schema(self) -> dict[str, Any]:
        """The same rule as a JSON schema, as far as that can say it."""

    def plain(self, value: T) -> Any:
        """`value` as JSON has it."""
        return value

    def _require(self, holds: bool) -> None:
        if not holds:
            raise self._refusal()

    def _refusal(self) -> NotOfKindError:
        return NotOfKindError(f"must be {self.rule}")


class Flag(Kind[bool]):
    """Yes or no."""

    rule = "true or false"

    def from_value(self, value: Any) -> bool:
        self._require(isinstance(value, bool))
        return bool(value)

    def from_text(self, text: str) -> bool:
        self._require(text.lower() in _FLAG_WORDS)
        return _FLAG_WORDS[text.lower()]

    def json_schema(self) -> dict[str, Any]:
        return {"type": "boolean"}


class WholeNumber(Kind[int]):
    """An integer with a lower bound."""

    def __init__(self, *, at_least: int) -> None:
        self._at_least = at_least

    @property
    def rule(self) -> str:
        return f"an integer of at least {self._at_least} and below 2**63"

    def from_value(self, value: Any) -> int:
        self._require(is_whole(value) and self._at_least <= value < _LIMIT)
        return int(value)

    def from_text(self, text: str) -> int:
        self._require(_WHOLE_NUMBER.fullmatch(text) is not None and len(text.strip()) <= _MAX_DIGITS)
        return self.from_value(int(text))

    def json_schema(self) -> dict[str, Any]:
        return {"type": "integer", "minimum": self._at_least, "exclusiveMaximum": _LIMIT}


class ByteCount(Kind[int]):
    """A number of bytes: an integer, or text with a binary unit, such as `256 MiB`."""

    def __init__(self, *, at_least: int, multiple_of: int = 1) -> None:
        self._at_least = at_least
        self._multiple_of = multiple_of

    @property
    def rule(self) -> str:
        multiple = "" if self._multiple_of == 1 else f" and a multiple of {self._multiple_of}"
        return f"an integer of at least {self._at_least}{multiple} and below 2**63, or text such as '256 MiB'"

    def from_value(self, value: Any) -> int:
        if isinstance(value, str):
            return self.from_text(value)
        self._require(is_whole(value) and self._at_least <= value < _LIMIT and value % self._multiple_of == 0)
        return int(value)

    def from_text(self, text: str) -> int:
        size = _SIZE.match(text)
        if size is None or len(size[1]) > _MAX_DIGITS:
            raise self._refusal()
        return self.from_value(int(size[1]) * _UNIT_BYTES[(size[2] or "b").lower()])

    def json_schema(self) -> dict[str, Any]:
        integer: dict[str, Any] = {"type": "integer", "minimum": self._at_least, "exclusiveMaximum": _LIMIT}
        if self._multiple_of > 1:
            integer["multipleOf"] = self._multiple_of
        return {"anyOf": [integer, {"type": "string", "pattern": _SIZE_PATTERN}]}


class Seconds(Kind[float]):
    """A positive time that can be waited for."""

    rule = f"a number of seconds above 0 and at most {MAX_TIMEOUT_S}"

    def from_value(self, value: Any) -> float:
        self._require((is_whole(value) or isinstance(value, float)) and 0 < value <= MAX_TIMEOUT_S)
        return float(value)

    def from_text(self, text: str) -> float:
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        return self.from_value(seconds)

    def json_schema(self) -> dict[str, Any]:
        return {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_TIMEOUT_S}


class Name(Kind[str]):
    """A name that is not empty."""

    def __init__(self, *, of: str) -> None:
        """`of` says what the name is of, such as `sink`."""
        self._of = of

    @property
    def rule(self) -> str:
        return f"the name of a {self._of}"

    def from_value(self, value: Any) -> str:
        self._require(isinstance(value, str) and value != "")
        return str(value)

    def from_text(self, text: str) -> str:
        return self.from_value(text)

    def json_schema(self) -> dict[str, Any]:
        return {"type": "string", "minLength": 1}


class OptionalName(Kind[str | None]):
    """A name, or nothing."""

    def __init__(self, *, of: str) -> None:
        self._name = Name(of=of)

    @property
    def rule(self) -> str:
        return f"{self._name.rule}, or null"

    def from_value(self, value: Any) -> str | None:
        self._require(value is None or (isinstance(value, str) and value != ""))
        return None if value is None else str(value)

    def from_text(self, text: str) -> str | None:
        return self._name.from_text(text)

    def json_schema(self) -> dict[str, Any]:
        return {"anyOf": [self._name.json_schema(), {"type": "null"}]}


E = TypeVar("E", bound=Enum)


class Choice(Kind[E]):
    """One of an enum's values."""

    def __init__(self, choices: type[E]) -> None:
        self._by_word: dict[str, E] = {one.value: one for one in choices}

    @property
    def rule(self) -> str:
        return " or ".join(map(repr, self._by_word))

    def from_value(self, value: Any) -> E:
        self._require(isinstance(value, str) and value in self._by_word)
        return self._by_word[value]

    def from_text(self, text: str) -> E:
        return self.from_value(text)

    def json_schema(self) -> dict[str, Any]:
        return {"enum": list(self._by_word)}

    def plain(self, value: E) -> Any:
        return value.value


class Options(Kind[Mapping[str, Any]]):
    """Names with values of any kind."""

    rule = "a mapping of option names to values that JSON can say"

    def from_value(self, value: Any) -> Mapping[str, Any]:
        self._require(isinstance(value, Mapping) and all(isinstance(key, str) for key in value))
        options = dict(value)
        try:
            json.dumps(options, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise self._refusal() from error
        return options

    def from_text(self, text: str) -> Mapping[str, Any]:
        return self.from_value(_json(text))

    def json_schema(self) -> dict[str, Any]:
        return {"type": "object"}

    def plain(self, value: Mapping[str, Any]) -> Any:
        return dict(value)


class LayerNumbers(Kind[tuple[int, ...]]):
    """Numbers of decoder layers: ascending, each once."""

    rule = "a list of different layer numbers of at least 0"

    def from_value(self, value: Any) -> tuple[int, ...]:
        self._require(isinstance(value, list | tuple) and all(is_whole(one) and one >= 0 for one in value))
        self._require(len(set(value)) == len(value))
        return tuple(sorted(value))

    def from_text(self, text: str) -> tuple[int, ...]:
        return self.from_value(_json(text))

    def json_schema(self) -> dict[str, Any]:
        return {"type": "array", "items": {"type": "integer", "minimum": 0}, "uniqueItems": True}

    def plain(self, value: tuple[int, ...]) -> Any:
        return list(value)


def is_whole(value: Any) -> bool:
    """Whether `value` is an integer and no truth value."""
    return isinstance(value, int) and not isinstance(value, bool)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
