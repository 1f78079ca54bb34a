# SPDX-License-Identifier: Apache-2.0
"""Reads JSON that people wrote, in which a name that stands twice in one object is a mistake."""

from __future__ import annotations

import json
from typing import Any


def loads_without_repeats(text: str) -> Any:
    """The value in a JSON text; Python would keep the last of two members of one name without a word.

    Raises:
        ValueError: it is not JSON, is nested too deeply, or names a member twice.
    """
    try:
        return json.loads(text, object_pairs_hook=_members)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for name, value in pairs:
        if name in members:
            raise ValueError(f"{name!r} is given twice in one object; leave one")
        members[name] = value
    return members
