# SPDX-License-Identifier: Apache-2.0
"""What our sinks hold in memory at most, known from their options, before any is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omni_core.sinks.joiner import DEFAULT_MAX_OPEN_BYTES
from omni_core.sinks.options import checked_count

_LIMITS = {"memory": "max_bytes", "safetensors": "max_open_bytes"}
"""Our sinks that hold rows in memory, and the option that bounds it."""


def most_held_bytes(sink: str, options: Mapping[str, Any]) -> int | None:
    """Most bytes of rows that a sink holds in memory; `None` for another package's, of which it is not known.

    Args:
        sink: its entry-point name.
        options: its keyword arguments.

    Raises:
        InvalidSinkOptionError: the option that bounds it is not an integer of at least 1.
    """
    option = _LIMITS.get(sink)
    return None if option is None else checked_count(sink, option, options.get(option, DEFAULT_MAX_OPEN_BYTES))
