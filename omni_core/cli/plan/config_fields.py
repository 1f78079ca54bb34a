# SPDX-License-Identifier: Apache-2.0
"""Values of a model's configuration, each checked as it is read: a wrong one is named, never computed with."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omni_core.cli.plan.errors import PlanInputError
from omni_core.settings.kinds import is_whole

MAX_COUNT = (1 << 63) - 1
"""Above it no count of anything is meant."""


@dataclass(frozen=True, slots=True)
class ConfigFields:
    """One part of a configuration."""

    source: str
    """File and dotted path, for people."""
    section: Mapping[str, Any]

    def count(self, name: str) -> int | None:
        """The whole number of at least 1 that stands there; `None`: the field is missing or null.

        Raises:
            PlanInputError: it is something else.
        """
        value = self.section.get(name)
        if value is None:
            return None
        if not is_whole(value) or not 1 <= value <= MAX_COUNT:
            raise self.wrong(name, "a whole number of at least 1, below 2**63")
        return int(value)

    def needed_count(self, name: str) -> int:
        """The same of a field that must be there."""
        value = self.count(name)
        if value is None:
            raise self.wrong(name, "a whole number of at least 1")
        return value

    def count_or_zero(self, name: str) -> int:
        """The whole number that stands there; 0: the field is missing, null or 0, as if it were not used."""
        value = self.section.get(name)
        return 0 if is_whole(value) and value == 0 else self.count(name) or 0

    def word(self, name: str) -> str | None:
        """The text that stands there; `None`: the field is missing or null.

        Raises:
            PlanInputError: it is something else.
        """
        value = self.section.get(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong(name, "a text")
        return value

    def words(self, name: str) -> tuple[str, ...]:
        """The list of texts that stands there; empty: the field is missing or null.

        Raises:
            PlanInputError: it is something else.
        """
        value = self.section.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise self.wrong(name, "a list of texts")
        return tuple(value)

    def wrong(self, name: str, rule: str) -> PlanInputError:
        """The error for a field that breaks its rule."""
        return PlanInputError(f"{self.source}: {name} is {reprlib.repr(self.section.get(name))}; it must be {rule}")
