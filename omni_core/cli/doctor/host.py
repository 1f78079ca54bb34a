# SPDX-License-Identifier: Apache-2.0
"""What the machine and its container let this process have of memory."""

from __future__ import annotations

import resource
from dataclasses import dataclass

from omni_core.prefix_cache.host_limit import HostLimit, host_memory


@dataclass(frozen=True, slots=True)
class HostReport:
    """Limits of this process. `None` where there is none, or the system tells nothing."""

    memory_limit: HostLimit | None
    """The tightest of the machine's memory and of the control groups'."""
    memory_available: HostLimit | None
    locked_limit_bytes: int | None
    """RLIMIT_MEMLOCK, the soft one: most memory the process may lock. Not every driver counts what it pins."""
    locked_limit_hard_bytes: int | None
    """What the process may raise it to."""


def look_at_host() -> HostReport:
    """Read the limits of the calling process; a few files."""
    memory = host_memory()
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return HostReport(memory.limit, memory.available, _bounded(soft), _bounded(hard))


def _bounded(limit_bytes: int) -> int | None:
    return None if limit_bytes == resource.RLIM_INFINITY else limit_bytes
