# SPDX-License-Identifier: Apache-2.0
"""How a sink is found: by the name its distribution registers under the entry-point group `omni_core.sinks`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from omni_core.plugins import InstalledPlugin, PluginGroup
from omni_core.sinks.base import StageSink
from omni_core.sinks.errors import BrokenSinkError, DuplicateSinkError, InvalidSinkOptionError, UnknownSinkError
from omni_core.sinks.options import check_values

SINK_GROUP = "omni_core.sinks"
"""The entry-point group of sinks."""

_NO_OPTIONS: Mapping[str, Any] = {}
_SINKS = PluginGroup(
    group=SINK_GROUP,
    kind="sink",
    unknown_error=UnknownSinkError,
    duplicate_error=DuplicateSinkError,
    broken_error=BrokenSinkError,
)


def installed_sinks() -> tuple[InstalledPlugin, ...]:
    """Every registered sink, sorted by name. Imports none of them; a name claimed twice is listed twice."""
    return _SINKS.installed()


def load_sink_class(name: str) -> type[StageSink]:
    """Import the sink registered under `name`, and no other.

    Raises:
        UnknownSinkError: not installed; names what is.
        DuplicateSinkError: two distributions register the name; names both.
        BrokenSinkError: it cannot be imported, or is no `StageSink`.
    """
    loaded = _SINKS.load(name)
    if not (isinstance(loaded, type) and issubclass(loaded, StageSink)):
        raise BrokenSinkError(f"sink {name!r} leads to {loaded!r}, which is not a subclass of StageSink")
    return loaded


def create_sink(name: str, options: Mapping[str, Any] = _NO_OPTIONS) -> StageSink:
    """Make the sink registered under `name`, with its own keyword arguments.

    Raises:
        UnknownSinkError, DuplicateSinkError, BrokenSinkError: as `load_sink_class`.
        InvalidSinkOptionError: an option the sink does not have, one it needs is missing, or a value it refuses.
    """
    return check_sink(name, options)(**options)


def check_sink(name: str, options: Mapping[str, Any] = _NO_OPTIONS) -> type[StageSink]:
    """The class of the sink that `create_sink` would make with these options; makes none.

    Raises:
        UnknownSinkError, DuplicateSinkError, BrokenSinkError, InvalidSinkOptionError: as `create_sink`.
    """
    sink_class = load_sink_class(name)
    signature = inspect.signature(sink_class)
    try:
        signature.bind(**options)
    except TypeError as error:
        raise InvalidSinkOptionError(
            f"sink {name!r} with the options {dict(options)!r}: {error}; it takes {signature}"
        ) from error
    check_values(name, options, sink_class.option_rules)
    return sink_class
