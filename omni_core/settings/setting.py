# SPDX-License-Identifier: Apache-2.0
"""One setting, declared as a field of a frozen dataclass with its kind, its meaning and where it may be given."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from enum import Enum
from typing import Any

from omni_core.settings.kinds import Kind

_METADATA = "omni_core.setting"


class Place(Enum):
    """Where a setting may be given."""

    ANYWHERE = "flag, environment or file"
    TOOLS = "command line's flag, environment or file"
    """No stage reads it."""
    FLAG_ONLY = "flag"
    """It decides what vLLM compiles. Of our settings only the flag's are hashed into the key of vLLM's compile cache
    (`VllmConfig.compute_hash`); given elsewhere, it could meet code compiled for another value."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What is known of a setting before any value is."""

    name: str
    kind: Kind[Any]
    meaning: str
    """For the operator, in Markdown."""
    place: Place
    default: Any

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return VARIABLE_PREFIX + self.name.upper()


VARIABLE_PREFIX = "OMNI_CORE_"


def declared(kind: Kind[Any], meaning: str, *, place: Place = Place.ANYWHERE) -> dict[str, Any]:
    """The metadata of a dataclass field that is a setting."""
    return {_METADATA: (kind, meaning, place)}


def settings_of(group: type[Any]) -> Iterator[Setting]:
    """The settings a dataclass declares, in its order."""
    for one in fields(group):
        kind, meaning, place = one.metadata[_METADATA]
        default = one.default if one.default_factory is MISSING else one.default_factory()
        yield Setting(one.name, kind, meaning, place, default)
