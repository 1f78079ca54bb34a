# SPDX-License-Identifier: Apache-2.0
"""What is found out about one backend: facts in the order they are found, as JSON lines between two processes.

The examined process may hang or die at any point; what it had found until then has been written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any


class Stage(StrEnum):
    """What the examined process is about to do; of the checks and what follows, each says itself."""

    START = "its start"
    IMPORT_CORE = "the import of torch and omni-core"
    IMPORT_BACKEND = "the import of the backend"
    AVAILABILITY = "unavailable_reason()"
    MAKE = "making the backend"
    DEVICE = "device_info()"
    CLOSE = "closing the backend"
    THROUGHPUT = "measuring copies"


@dataclass(frozen=True, slots=True)
class Examination:
    """Facts about one backend."""

    stage: str = Stage.START
    """What was begun last: a `Stage`, or a conformance check."""
    device_type: str | None = None
    refuses: str | None = None
    unavailable_reason: str | None = None
    error: str | None = None
    """What kept the process from going on, in one line."""
    device: Mapping[str, Any] | None = None
    """Fields of `DeviceInfo`."""
    capabilities: Mapping[str, bool] | None = None
    num_checks: int | None = None
    checks: Mapping[str, str | None] = field(default_factory=dict)
    """Conformance checks that ended, by name: `None` passed, else why not."""
    conformance_s: float | None = None
    """How long all checks took; `None`: they did not end."""
    pinned_bytes_per_s: float | None = None
    pageable_bytes_per_s: float | None = None
    finished: bool = False
    """Whether the process said that it was done."""

    @property
    def failed(self) -> dict[str, str]:
        """Checks that failed, with why."""
        return {name: why for name, why in self.checks.items() if why is not None}

    def with_facts(self, facts: Mapping[str, Any]) -> Examination:
        """With one line of the examined process: fields of this class; `checks` adds to those known."""
        return replace(self, **{**facts, "checks": {**self.checks, **facts.get("checks", {})}})
