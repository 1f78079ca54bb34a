# SPDX-License-Identifier: Apache-2.0
"""What the cache says about itself, held against what must be true while a stage runs and once it is over."""

from __future__ import annotations

from omni_core.prefix_cache.stats import CacheStats
from omni_core.testing.row_judge import OracleViolationError


def check_deferred_budget(stats: CacheStats, device_staging_bytes: int) -> None:
    """Deferred rows never hold more device memory than they were given.

    Raises:
        OracleViolationError: they do.
    """
    if stats.deferred_bytes > device_staging_bytes:
        raise OracleViolationError(
            f"{stats.deferred_records} deferred records hold {stats.deferred_bytes} bytes of the device; "
            f"device_staging_bytes={device_staging_bytes}"
        )


def check_at_rest(stats: CacheStats, rows_kept: int) -> None:
    """Once every request has ended, every step was consumed and writes were flushed, nothing is held.

    Args:
        stats: the cache's counters.
        rows_kept: positions delivered for good, as the judge counted them.

    Raises:
        OracleViolationError: names what is held, or the other count.
    """
    held = {
        "open_steps": stats.open_steps,
        "live_requests": stats.live_requests,
        "live_reads": stats.live_reads,
        "pinned_slots": stats.pinned_slots,
        "staging_slots_in_use": stats.staging_slots_in_use,
        "queued_writes": stats.queued_writes,
        "deferred_records": stats.deferred_records,
        "deferred_bytes": stats.deferred_bytes,
        "deferred_writes_open": stats.deferred_writes_open,
    }
    left = {name: count for name, count in held.items() if count}
    if left:
        raise OracleViolationError(f"every request has ended and every step was consumed, yet the cache holds {left}")
    if stats.rows_delivered != rows_kept:
        raise OracleViolationError(f"{rows_kept} rows were delivered, the cache counts {stats.rows_delivered}")
