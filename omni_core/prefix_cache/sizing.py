# SPDX-License-Identifier: Apache-2.0
"""What one cache costs, and all caches of a host: known before anything is allocated. Pure arithmetic, no look around.

The same `CacheMemory` is what a live cache reports of itself (`CacheStats.memory`), counted from what it allocated.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from omni_core.backend.memory import CARVE_ALIGNMENT_BYTES, aligned_nbytes
from omni_core.prefix_cache.config import HIDDEN_KEY, PrefixCacheConfig
from omni_core.prefix_cache.slot_table import KEY_BYTES_PER_SLOT, SHARED_BYTES_PER_BLOCK, SHARED_BYTES_PER_SLOT

NUM_BOUNCES = 2
"""Buffers that deferred rows cross through: one is put into the pool while the next record comes into the other."""


@dataclass(frozen=True, slots=True)
class CacheMemory:
    """Bytes of one cache, by what they are for."""

    staging_bytes: int
    """Pinned host pages that steps cross through, committed when the cache is built."""
    bounce_bytes: int
    """Pinned host buffers that deferred rows cross through, committed when the policy is registered."""
    snapshot_ring_bytes: int
    """Device memory that a step's rows are cloned into."""
    deferred_ring_bytes: int
    """Device memory that deferred rows wait in."""
    pool_bytes: Mapping[str, int]
    """Stored key → host address space of its rows; memory is committed as blocks are first written."""
    key_table_bytes: Mapping[str, int]
    """Stored key → host bytes of its tables, committed as slots are first used."""
    shared_table_bytes: int
    """Host bytes of the tables that all keys share, committed as slots are first used."""
    max_recycled_bytes: int
    """Most host bytes kept in released output buffers."""

    @property
    def pinned_bytes(self) -> int:
        """Page-locked host memory."""
        return self.staging_bytes + self.bounce_bytes

    @property
    def device_bytes(self) -> int:
        """Device memory."""
        return self.snapshot_ring_bytes + self.deferred_ring_bytes

    @property
    def table_bytes(self) -> int:
        """All tables."""
        return self.shared_table_bytes + sum(self.key_table_bytes.values())

    @property
    def reserved_bytes(self) -> int:
        """Address space that memory comes to as blocks are used: every key's rows, and the tables."""
        return sum(self.pool_bytes.values()) + self.table_bytes


@dataclass(frozen=True, slots=True)
class HostPlan:
    """Host bytes of all caches of one host, and of what their stages keep of delivered rows."""

    cache: CacheMemory
    caches_per_host: int = 1
    device_is_host: bool = False
    """Whether the rings lie in host memory, as on a CPU."""
    pretouched_keys: tuple[str, ...] = ()
    """Keys whose rows are committed at start."""
    sink_queue_bytes: int = 0
    """Rows of one stage that may wait for its sink."""
    sink_bytes: int = 0
    """What one stage's sink itself may hold in memory."""
    beside_bytes: int = 0
    """What other stages of the host take, as its operator says."""

    @property
    def pretouch_bytes(self) -> int:
        """Rows of one cache that are committed at start."""
        return sum(self.cache.pool_bytes[key] for key in self.pretouched_keys)

    @property
    def start_bytes(self) -> int:
        """Committed by one cache before the first step."""
        rings = self.cache.device_bytes if self.device_is_host else 0
        return self.cache.pinned_bytes + rings + self.pretouch_bytes

    @property
    def start_on_host_bytes(self) -> int:
        """Committed by all caches of the host before the first step, and what other stages take."""
        return self.start_bytes * self.caches_per_host + self.beside_bytes

    @property
    def most_bytes(self) -> int:
        """What one stage can come to."""
        reserved = self.cache.reserved_bytes - self.pretouch_bytes
        outputs = self.cache.max_recycled_bytes + self.sink_queue_bytes + self.sink_bytes
        return self.start_bytes + reserved + outputs

    @property
    def most_on_host_bytes(self) -> int:
        """What all stages of the host can come to, the others included."""
        return self.most_bytes * self.caches_per_host + self.beside_bytes


@dataclass(frozen=True, slots=True)
class StageSizes:
    """Everything the cost of a stage follows from. `plan` is pure; `replace` a field to ask what if."""

    config: PrefixCacheConfig
    """Its `extra_row_bytes` without what `layer_keys` need."""
    row_bytes: Mapping[str, int] = field(default_factory=dict)
    """Further stored keys and the bytes of one row of each."""
    deferred_keys: Collection[str] = ()
    """Those of them that wait on the device."""
    keeps_hidden: bool = True
    """Whether hidden rows are stored."""
    layer_keys: tuple[str, ...] = ()
    """Captured decoder layers: keys with rows like the hidden ones, and room of their own in staging."""
    device_is_host: bool = False
    sink_queue_bytes: int = 0
    sink_bytes: int = 0
    beside_bytes: int = 0

    @property
    def cache_config(self) -> PrefixCacheConfig:
        """The configuration that the cache is built with."""
        layer_bytes = len(self.layer_keys) * self.config.hidden_row_bytes
        return replace(self.config, extra_row_bytes=self.config.extra_row_bytes + layer_bytes)

    @property
    def before_policy(self) -> StageSizes:
        """What is allocated whatever the policy says: staging, and no row of any key."""
        config = replace(self.cache_config, pretouch=False)
        return replace(self, config=config, row_bytes={}, deferred_keys=(), keeps_hidden=False, layer_keys=())

    @property
    def stored_row_bytes(self) -> dict[str, int]:
        """Every stored key, and the bytes of one row."""
        like_hidden = ((HIDDEN_KEY,) if self.keeps_hidden else ()) + self.layer_keys
        return dict.fromkeys(like_hidden, self.config.hidden_row_bytes) | dict(self.row_bytes)

    @property
    def missing_row_bytes(self) -> int:
        """By how much `extra_row_bytes` is too small for a largest step with a row of every key; 0: it is not."""
        config = self.cache_config
        # Hidden rows cross through staging, kept or not.
        rows = [*self.row_bytes.values(), *[config.hidden_row_bytes] * (1 + len(self.layer_keys))]
        needed = sum(aligned_nbytes(config.max_num_tokens * nbytes) for nbytes in rows)
        return max(0, -(-(needed - config.staging_arena_bytes) // config.max_num_tokens))

    @property
    def with_row_room(self) -> StageSizes:
        """The same stage with `extra_row_bytes` raised by `missing_row_bytes`."""
        extra_row_bytes = self.config.extra_row_bytes + self.missing_row_bytes
        return replace(self, config=replace(self.config, extra_row_bytes=extra_row_bytes))

    def plan(self) -> HostPlan:
        """The plan."""
        config = self.cache_config
        cache = plan_cache(config, self.stored_row_bytes, has_deferred=bool(self.deferred_keys))
        return HostPlan(
            cache,
            caches_per_host=config.caches_per_host,
            device_is_host=self.device_is_host,
            pretouched_keys=tuple(self._known_keys) if config.pretouch else (),
            sink_queue_bytes=self.sink_queue_bytes,
            sink_bytes=self.sink_bytes,
            beside_bytes=self.beside_bytes,
        )

    @property
    def _known_keys(self) -> list[str]:
        """Keys whose rows are known at start: hidden rows, layers, and what the configuration declares."""
        return [key for key in self.stored_row_bytes if key not in self.row_bytes or key in self.config.key_rows]


def plan_cache(config: PrefixCacheConfig, row_bytes: Mapping[str, int], *, has_deferred: bool = False) -> CacheMemory:
    """What a cache of this configuration costs. Pure.

    Args:
        config: as the cache is built with it.
        row_bytes: every stored key, hidden rows included, and the bytes of one row.
        has_deferred: whether the policy declares keys that wait on the device.
    """
    staging_bytes = config.staging_depth * config.staging_arena_bytes
    ring_bytes = deferred_ring_bytes(config) if has_deferred else 0
    record_bytes = max_record_bytes(config, keeps_hidden=HIDDEN_KEY in row_bytes) if ring_bytes else 0
    return CacheMemory(
        staging_bytes=staging_bytes,
        bounce_bytes=NUM_BOUNCES * record_bytes,
        snapshot_ring_bytes=staging_bytes,
        deferred_ring_bytes=ring_bytes,
        pool_bytes={key: config.pool_bytes(nbytes) for key, nbytes in row_bytes.items()},
        key_table_bytes=dict.fromkeys(row_bytes, config.num_slots * KEY_BYTES_PER_SLOT),
        shared_table_bytes=config.num_slots * SHARED_BYTES_PER_SLOT + config.num_blocks * SHARED_BYTES_PER_BLOCK,
        max_recycled_bytes=config.max_recycled_bytes,
    )


def deferred_ring_bytes(config: PrefixCacheConfig) -> int:
    """Bytes of the ring for deferred rows: `device_staging_bytes` in whole carving steps."""
    return config.device_staging_bytes // CARVE_ALIGNMENT_BYTES * CARVE_ALIGNMENT_BYTES


def max_record_bytes(config: PrefixCacheConfig, *, keeps_hidden: bool) -> int:
    """Most deferred bytes of one step: the ring, or what a staging page has beside the hidden rows."""
    hidden_bytes = config.max_num_tokens * config.hidden_row_bytes if keeps_hidden else 0
    page_room_bytes = max(aligned_nbytes(1), aligned_nbytes(config.staging_arena_bytes - hidden_bytes))
    return min(deferred_ring_bytes(config), page_room_bytes)
