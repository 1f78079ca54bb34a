# SPDX-License-Identifier: Apache-2.0
"""Checks of sink options, which come from JSON: a text such as "false" must not pass for a truth value."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from omni_core.sinks.errors import InvalidSinkOptionError


def check_values(sink: str, options: Mapping[str, Any], rules: Mapping[str, Callable[[str, str, Any], Any]]) -> None:
    """Ask each option's rule, one of the functions below; an option without one is left alone.

    Raises:
        InvalidSinkOptionError: as the rule.
    """
    for option in options.keys() & rules.keys():
        rules[option](sink, option, options[option])


def checked_bool(sink: str, option: str, value: Any) -> bool:
    """`value`, if it is `True` or `False`.

    Raises:
        InvalidSinkOptionError: it is anything else; names sink, option and value.
    """
    if not isinstance(value, bool):
        raise InvalidSinkOptionError(f"{sink} sink: {option}={value!r}: must be true or false")
    return value


def checked_count(sink: str, option: str, value: Any) -> int:
    """`value`, if it is an integer of at least 1.

    Raises:
        InvalidSinkOptionError: it is anything else; names sink, option and value.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidSinkOptionError(f"{sink} sink: {option}={value!r}: must be an integer of at least 1")
    return value


def checked_path(sink: str, option: str, value: Any) -> str:
    """`value` as text, if it is a path that names something.

    Raises:
        InvalidSinkOptionError: it is anything else; names sink, option and value.
    """
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(path, str) or path == "" or "\0" in path:
        raise InvalidSinkOptionError(f"{sink} sink: {option}={value!r}: must be the path of a directory")
    return path
