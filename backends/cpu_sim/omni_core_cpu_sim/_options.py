# SPDX-License-Identifier: Apache-2.0
"""Checks of the simulator's options: each error names the option, its value and the rule."""

from __future__ import annotations

import math

from omni_core.backend.errors import BackendOptionError


def check_number(option: str, value: float) -> None:
    """Refuse what is no finite number of at least 0.

    Raises:
        BackendOptionError: it is not.
    """
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise BackendOptionError(f"cpu_sim: {option}={value!r} must be a finite number of at least 0")


def check_integer(option: str, value: int, *, at_least: int) -> None:
    """Refuse what is no integer of at least `at_least`.

    Raises:
        BackendOptionError: it is not.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise BackendOptionError(f"cpu_sim: {option}={value!r} must be an integer of at least {at_least}")
