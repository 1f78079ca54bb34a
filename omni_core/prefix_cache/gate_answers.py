# SPDX-License-Identifier: Apache-2.0
"""What the gate answers, and what a rule of its decision table is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from omni_core.prefix_cache.gate_facts import StageFacts


class GateStatus(Enum):
    """The gate's four answers."""

    SUPPORTED = "supported"
    """The stage gets a cache."""
    IGNORED = "ignored"
    """The stage has no use for one; nothing is built and nothing is wrong."""
    ADVISED_OFF = "off by advice"
    """As ignored, but a cache could be built: it is thought to bring this stage nothing."""
    REFUSED = "refused"
    """A cache was asked for that cannot give right rows here; start-up must stop."""


@dataclass(frozen=True, slots=True)
class GateDecision:
    """The answer, with the rule that gave it."""

    status: GateStatus
    rule: str
    reason: str
    """Why, with the stage's values."""
    remedy: str = ""
    """What to change for another answer; empty where there is nothing to change."""

    @property
    def explanation(self) -> str:
        """The reason and the remedy, in one line."""
        return f"{self.reason}; {self.remedy}" if self.remedy else self.reason


@dataclass(frozen=True, slots=True)
class GateRule:
    """One row of the decision table: the first row that applies decides."""

    name: str
    status: GateStatus
    when: str
    """When it applies, for the documentation."""
    applies: Callable[[StageFacts], bool]
    reason: Callable[[StageFacts], str]
    """Why, with the stage's values."""
    remedy: str = ""
    """What to change for another answer."""
    remedy_here: Callable[[StageFacts], str] | None = None
    """What to change on this very stage, where that depends on its values."""
