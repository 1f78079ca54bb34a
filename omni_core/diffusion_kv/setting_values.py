# SPDX-License-Identifier: Apache-2.0
"""Names and types of settings, before anyone asks whether they go together."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import fields
from enum import StrEnum
from typing import Any

from omni_core.diffusion_kv.errors import DiffusionKVConfigError, DiffusionKVConfigTypeError
from omni_core.diffusion_kv.settings import DiffusionKVSettings


def checked_values(settings: DiffusionKVSettings) -> dict[str, Any]:
    """Every value with its type checked, and names of an enum's members as members.

    Raises:
        DiffusionKVConfigTypeError: a value of the wrong type.
        DiffusionKVConfigError: text that names no member.
    """
    kinds = _kinds(type(settings))
    return {name: _checked_value(name, getattr(settings, name), kinds[name]) for name in kinds}


def checked_names(given: Mapping[str, Any], known: Iterable[str], *, of: str) -> dict[str, Any]:
    """The settings given, if each has a known name.

    Raises:
        DiffusionKVConfigError: an unknown name; tells the nearest known one.
    """
    known = tuple(known)
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there is {', '.join(known)}"
            raise DiffusionKVConfigError(f"{of} has no setting {name!r}; {hint}")
    return dict(given)


def _kinds(settings: type[DiffusionKVSettings]) -> Mapping[str, tuple[Any, ...]]:
    """The types each setting may have."""
    hints = typing.get_type_hints(settings)
    return {
        field.name: typing.get_args(hints[field.name])
        if isinstance(hints[field.name], types.UnionType)
        else (hints[field.name],)
        for field in fields(settings)
    }


def _checked_value(name: str, value: Any, kinds: tuple[Any, ...]) -> Any:
    for kind in kinds:
        if isinstance(kind, type) and issubclass(kind, StrEnum):
            if isinstance(value, kind):
                return value
            if type(value) is str:
                return _member(name, value, kind)
        elif typing.get_origin(kind) is Mapping:
            if isinstance(value, Mapping):
                return value
        elif type(value) is kind or (kind is float and type(value) is int):
            return value
    wanted = " or ".join("null" if kind is type(None) else _word(kind) for kind in kinds)
    raise DiffusionKVConfigTypeError(f"{name}={value!r} is a {type(value).__name__}; {wanted} is wanted")


def _member(name: str, value: str, kind: type[StrEnum]) -> StrEnum:
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(member.value for member in kind)
        raise DiffusionKVConfigError(f"{name}={value!r} is none of {known}{_NOTES.get(name, '')}") from None


def _word(kind: Any) -> str:
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return f"one of {', '.join(member.value for member in kind)}"
    return str(kind.__name__) if isinstance(kind, type) else "a mapping"


_NOTES: Mapping[str, str] = types.MappingProxyType(
    {"attention_owner": ": no other attention backend reads and writes pages; use kernel or gathered"}
)
