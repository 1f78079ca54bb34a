# SPDX-License-Identifier: Apache-2.0
"""What the cache reports about itself: plain numbers at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from omni_core.prefix_cache.sizing import CacheMemory


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
    deferred_records: int
    """Steps whose deferred rows are on the device, those on their way to the host included."""
    deferred_bytes: int
    """Device bytes charged for them; never more than `device_staging_bytes`."""
    deferred_writes_open: int
    """Requests with deferred rows that nothing has asked to leave the device yet."""
    deferred_copies: int
    """Transfers of deferred rows to the host begun so far: one per step."""
    pool_reserved_bytes: int
    """Address space of the pool; memory is committed as blocks are first written."""
    pinned_bytes: int
    """Page-locked host memory of staging pages and bounce buffers."""
    device_bytes: int
    """Device memory of the snapshot ring and of the ring for deferred rows."""
    recycled_bytes: int
    """Released output buffers kept for reuse."""
    memory: CacheMemory
    """What is allocated or reserved, by what it is for: the figures of `omni-core plan`, of the live cache."""
    weight_version: int
    """How often `bump_weight_version` was called."""
    adapter_versions: Mapping[int, int]
    """Adapter id → how often `bump_adapter_version` was called for it; the latest adapters only."""


@dataclass(frozen=True, slots=True)
class ResetReport:
    """What `reset` cleared."""

    rows_cleared: Mapping[str, int]
    """Key → rows that were present."""
    requests_forgotten: int
    steps_dropped: int
    writes_dropped: int
    """Queued writes; deferred rows that were still waiting on the device are not among them."""
    deferred_records_dropped: int
    """Steps whose deferred rows were waiting on the device."""
    bytes_cleared: int
    """Of the rows that were present. Their host memory stays with the pool, for the rows to come."""
    failure_cleared: str | None
    """The sticky failure that was lifted, if there was one."""


@dataclass(frozen=True, slots=True)
class VersionReport:
    """What a new version of the weights, or of an adapter, made absent."""

    adapter_id: int | None
    """`None`: the weights, and so every adapter."""
    version: int
    """How often it was bumped, this time included."""
    rows_absent: Mapping[str, int]
    """Key → rows that were present and are not any more. Rows of a step that is under way go, too, and are not counted;
    a row that is overwritten during the call may be."""
