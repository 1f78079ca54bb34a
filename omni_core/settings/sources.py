# SPDX-License-Identifier: Apache-2.0
"""Where values come from: a flag, the environment, a TOML file. Nothing is checked here but that they can be read."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from omni_core.settings.errors import SettingsError
from omni_core.settings.setting import VARIABLE_PREFIX

CONFIG_FILE_VARIABLE = "OMNI_CORE_CONFIG_FILE"
"""The environment variable that names the file."""
SECTION = "omni_core"
"""The key of our section in vLLM's `additional_config`."""
_NEAR_SECTION = 0.85
"""difflib's ratio from which a section's name is taken for a misspelt one of ours: `omnicore`, `omni-core`."""


class Origin(Enum):
    """Who said it; an earlier one wins over a later one."""

    FLAG = "flag"
    ENVIRONMENT = "environment"
    FILE = "file"
    DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class GivenValue:
    """One value as it was given."""

    name: str
    """The setting it is for, if there is one of that name."""
    value: Any
    origin: Origin
    shown_as: str
    """The place, to be followed by `=value` in an error."""
    is_text: bool = False
    """Whether `value` is text to be understood, not a value of its own."""
    for_stage: bool = False
    """Whether only a stage sees it."""


def from_additional_config(additional_config: Any) -> Iterator[GivenValue]:
    """What the `omni_core` section of vLLM's `additional_config` says.

    Raises:
        SettingsError: the section is no mapping, or a section is called almost like it.
    """
    if not isinstance(additional_config, Mapping):  # a plugin's own object
        return
    if SECTION not in additional_config:
        for near in difflib.get_close_matches(SECTION, map(str, additional_config), n=1, cutoff=_NEAR_SECTION):
            raise SettingsError(f"additional_config has no section {SECTION!r}, but one called {near!r}; rename it")
        return
    section = additional_config[SECTION]
    if not isinstance(section, Mapping):
        raise SettingsError(
            f"additional_config[{SECTION!r}] is a {type(section).__name__}; make it a mapping such as "
            '{"enabled": true, "sink": "memory"}'
        )
    for name, value in section.items():
        yield GivenValue(str(name), value, Origin.FLAG, f"{SECTION}.{name}", for_stage=True)


def from_flags(assignments: Iterable[str]) -> Iterator[GivenValue]:
    """What `NAME=VALUE` flags say.

    Raises:
        SettingsError: one has no `=`, or a name is given twice.
    """
    seen = set()
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        name = name.strip()
        if not equals:
            raise SettingsError(f"--set {assignment}: must be NAME=VALUE")
        if name in seen:
            raise SettingsError(f"--set {name} is given twice; give it once")
        seen.add(name)
        yield GivenValue(name, text, Origin.FLAG, f"--set {name}", is_text=True)


def from_environment(environment: Mapping[str, str]) -> Iterator[GivenValue]:
    """What the variables `OMNI_CORE_*` say. An empty one says nothing."""
    for variable, text in sorted(environment.items()):
        if variable.startswith(VARIABLE_PREFIX) and variable != CONFIG_FILE_VARIABLE and text:
            name = variable.removeprefix(VARIABLE_PREFIX)
            # In other letters it is another variable, which might stand beside the right one.
            yield GivenValue(
                name.lower() if name.isupper() else variable, text, Origin.ENVIRONMENT, variable, is_text=True
            )


def from_file(path: Path, named_by: str = CONFIG_FILE_VARIABLE) -> Iterator[GivenValue]:
    """What a TOML file says. Reads it. `named_by` is who named it, for errors.

    Raises:
        SettingsError: it cannot be read, or is not TOML; names the file and the line.
    """
    try:
        if not path.is_file():  # a pipe would be waited for without end
            raise FileNotFoundError("there is no such file, or it is none")
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{named_by}={path}: cannot be read: {error}; leave it out, or name a file") from error
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{named_by}={path}: is not TOML: {error}") from error
    for name, value in document.items():
        yield GivenValue(name, value, Origin.FILE, f"{path}: {name}")
