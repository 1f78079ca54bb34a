# SPDX-License-Identifier: Apache-2.0
"""Puts the sources together: flag, then environment, then file, then default. Tells every mistake at once."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omni_core.settings.errors import SettingsError
from omni_core.settings.kinds import NotOfKindError
from omni_core.settings.setting import VARIABLE_PREFIX, Place, Setting, settings_of
from omni_core.settings.sources import (
    CONFIG_FILE_VARIABLE,
    SECTION,
    GivenValue,
    Origin,
    from_additional_config,
    from_environment,
    from_file,
)
from omni_core.settings.stage_settings import SCHEMA, StageSettings, ToolSettings

_MAX_SHOWN = 200
"""Characters of a wrong value that an error shows."""
_KNOWN = {one.name: one for one in SCHEMA}


@dataclass(frozen=True, slots=True)
class ResolvedValue:
    """One setting's value and where it came from."""

    setting: Setting
    value: Any
    origin: Origin
    shown_as: str
    """The place; empty for a default."""


@dataclass(frozen=True, slots=True)
class ResolvedSettings:
    """Every setting's value, in the schema's order."""

    values: tuple[ResolvedValue, ...]

    def stage(self) -> StageSettings:
        """Those of a stage."""
        return StageSettings(**self._of(StageSettings))

    def tools(self) -> ToolSettings:
        """Those of the command line."""
        return ToolSettings(**self._of(ToolSettings))

    def plain(self) -> dict[str, dict[str, Any]]:
        """Name → value and origin, as JSON has them."""
        return {
            one.setting.name: {
                "value": one.setting.kind.plain(one.value),
                "origin": one.origin.value,
                "place": one.shown_as,
            }
            for one in self.values
        }

    def given(self) -> str:
        """Those that are not left at their defaults, in words for a log."""
        told = (
            f"{one.setting.name}={one.setting.kind.plain(one.value)!r} ({one.shown_as})"
            for one in self.values
            if one.origin is not Origin.DEFAULT
        )
        return ", ".join(told) or "none"

    def _of(self, group: type[Any]) -> dict[str, Any]:
        names = {one.name for one in settings_of(group)}
        return {one.setting.name: one.value for one in self.values if one.setting.name in names}


def stage_settings(additional_config: Any, environment: Mapping[str, str]) -> ResolvedSettings:
    """The settings of a stage whose worker got `additional_config`. At start; reads the file that is named, if any.

    Args:
        additional_config: vLLM's. Without an `omni_core` section the stage is off.
        environment: variables of the process.

    Raises:
        SettingsError: tells every mistake of every source.
    """
    return resolve(from_additional_config(additional_config), environment)


def resolve(flags: Iterable[GivenValue], environment: Mapping[str, str], file: Path | None = None) -> ResolvedSettings:
    """Every setting from all sources. Reads `file` (`--file` in errors), or else the one the environment names.

    Raises:
        SettingsError: tells every mistake of every source, also of a value that another source overrides.
    """
    named = environment.get(CONFIG_FILE_VARIABLE)
    in_file: Iterable[GivenValue] = ()
    if file is not None:
        in_file = from_file(_at_home(file), "--file")
    elif named:
        in_file = from_file(_at_home(Path(named)))
    problems: list[str] = []
    chosen: dict[str, ResolvedValue] = {}
    for source in (flags, from_environment(environment), in_file):
        try:
            for given in source:
                try:
                    value = _understood(given)
                except SettingsError as error:
                    problems.extend(error.problems)
                else:
                    chosen.setdefault(given.name, value)
        except SettingsError as error:
            problems.extend(error.problems)
    if problems:
        raise SettingsError(*problems)
    return ResolvedSettings(
        tuple(chosen.get(one.name, ResolvedValue(one, one.default, Origin.DEFAULT, "")) for one in SCHEMA)
    )


def _understood(given: GivenValue) -> ResolvedValue:
    known = _KNOWN.get(given.name)
    if known is None:
        raise SettingsError(_unknown(given))
    if known.place is Place.FLAG_ONLY and given.origin is not Origin.FLAG:
        raise SettingsError(
            f"{given.shown_as}={_shown(given.value)}: {known.name} decides what vLLM compiles, so it must be part of "
            f'vLLM\'s compile-cache key: give it in --additional-config \'{{"{SECTION}": {{"{known.name}": ...}}}}\''
        )
    if known.place is Place.TOOLS and given.for_stage:
        raise SettingsError(
            f"{given.shown_as}={_shown(given.value)}: no stage reads {known.name}; give it as {known.variable}"
        )
    try:
        value = known.kind.from_text(given.value) if given.is_text else known.kind.from_value(given.value)
    except NotOfKindError as error:
        raise SettingsError(f"{given.shown_as}={_shown(given.value)}: {error}") from error
    return ResolvedValue(known, value, given.origin, given.shown_as)


def _at_home(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError:  # no such user: there will be no such file either
        return path


def _shown(value: Any) -> str:
    try:
        shown = repr(value)
    except ValueError:  # Python does not write integers of thousands of digits
        return f"a {type(value).__name__} too long to show"
    return shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]}…"


def _unknown(given: GivenValue) -> str:
    names = [one.name for one in SCHEMA if one.place is not Place.FLAG_ONLY or given.origin is Origin.FLAG]
    near = difflib.get_close_matches(given.name.removeprefix(VARIABLE_PREFIX).lower(), names, n=1)
    if given.origin is Origin.ENVIRONMENT:
        near = [VARIABLE_PREFIX + name.upper() for name in near]
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return f"unknown setting {given.shown_as}{hint} Known settings: {', '.join(names)}"
