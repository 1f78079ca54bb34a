# SPDX-License-Identifier: Apache-2.0
"""What a snapshot means beside the one the worker holds of the same request: one table."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from types import MappingProxyType

from omni_core.diffusion_kv.snapshot import KVSnapshot


class Age(Enum):
    """The held generation beside the incoming one."""

    SAME = auto()
    OLDER = auto()
    NEWER = auto()


class InstallAction(Enum):
    """What `KVWorker.install` does."""

    TAKE_ROWS = auto()
    """Write the rows' page ids into free table rows."""
    NOTHING = auto()
    """It is installed already."""
    RAISE_GENERATION = auto()
    """The same pages were reserved again; its rows begin again with their first step."""
    REFUSE_CONFLICT = auto()
    """One reservation cannot have two contents."""
    REFUSE_STALE = auto()
    """A message that was overtaken."""
    REFUSE_NOT_REMOVED = auto()
    """Another reservation, and the earlier one was never removed."""


INSTALL_RULES: Mapping[tuple[Age, bool], InstallAction] = MappingProxyType(
    {
        (Age.SAME, True): InstallAction.NOTHING,
        (Age.SAME, False): InstallAction.REFUSE_CONFLICT,
        (Age.OLDER, True): InstallAction.RAISE_GENERATION,
        (Age.OLDER, False): InstallAction.REFUSE_NOT_REMOVED,
        (Age.NEWER, True): InstallAction.REFUSE_STALE,
        (Age.NEWER, False): InstallAction.REFUSE_STALE,
    }
)
"""(age of what is held, whether its rows equal the incoming ones) -> what to do."""


def install_action(held: KVSnapshot | None, incoming: KVSnapshot) -> InstallAction:
    """What to do with `incoming` where `held` is held of the same request."""
    if held is None:
        return InstallAction.TAKE_ROWS
    if held.generation == incoming.generation:
        age = Age.SAME
    else:
        age = Age.OLDER if held.generation < incoming.generation else Age.NEWER
    return INSTALL_RULES[age, held.rows == incoming.rows]
