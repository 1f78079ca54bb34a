# SPDX-License-Identifier: Apache-2.0
"""What the cache reports about itself: plain numbers at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheStats:
    """A snapshot of counters and held resources."""

    steps_saved: int
    steps_materialized: int
    steps_discarded: int
    rows_delivered: int
    """Token positions delivered, hits included."""
    rows_from_hits: int
    """Token positions delivered from stored rows."""
    rows_rescued: int
    """Rows set aside because a read still wanted them when their slot was overwritten."""
    requests_failed: int
    """Requests that could not be served, counted once each."""
    open_steps: int
    """Steps saved and not yet consumed."""
    live_requests: int
    live_reads: int
    pinned_slots: int
    """Slots named by outstanding reads."""
    queued_writes: int
    staging_slots_in_use: int
    key_row_bytes: Mapping[str, int]
    """Stored keys and the bytes of one row of each."""
    pool_reserved_bytes: int
    """Address space of the pool; memory is committed as blocks are first written."""
    pinned_bytes: int
    device_bytes: int
    recycled_bytes: int
    """Released output buffers kept for reuse."""


@dataclass(frozen=True, slots=True)
class ResetReport:
    """What `reset` cleared."""

    rows_cleared: Mapping[str, int]
    """Key → rows that were present."""
    requests_forgotten: int
    steps_dropped: int
    writes_dropped: int
    failure_cleared: str | None
    """The sticky failure that was lifted, if there was one."""
