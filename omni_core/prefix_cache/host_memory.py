# SPDX-License-Identifier: Apache-2.0
"""What a cache will cost in host memory, what this process may use, and whether the one fits the other."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from omni_core.prefix_cache.config import HIDDEN_KEY, PrefixCacheConfig
from omni_core.prefix_cache.errors import HostMemoryError

logger = logging.getLogger(__name__)

_UNLIMITED_FROM_BYTES = 1 << 60
"""cgroup v1 writes "no limit" as a number near 2**63."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Host bytes of the caches of one host, known before anything is allocated."""

    staging_bytes: int
    """Pinned bytes of one cache, committed when it is built."""
    pool_bytes: Mapping[str, int]
    """Key → the most bytes its rows can come to in one cache; committed as blocks are first written."""
    recycled_bytes: int
    """The most bytes one cache keeps in released output buffers."""
    caches_per_host: int

    @property
    def pinned_on_host_bytes(self) -> int:
        """Committed at start by all caches of the host."""
        return self.staging_bytes * self.caches_per_host

    @property
    def most_on_host_bytes(self) -> int:
        """What all caches of the host can come to."""
        one = self.staging_bytes + sum(self.pool_bytes.values()) + self.recycled_bytes
        return one * self.caches_per_host


def plan_memory(config: PrefixCacheConfig, row_bytes: Mapping[str, int]) -> MemoryPlan:
    """The plan of a configuration whose stored keys have rows of `row_bytes`. Pure."""
    return MemoryPlan(
        staging_bytes=config.staging_depth * config.staging_arena_bytes,
        pool_bytes={key: config.pool_bytes(nbytes) for key, nbytes in row_bytes.items()},
        recycled_bytes=config.max_recycled_bytes,
        caches_per_host=config.caches_per_host,
    )


@dataclass(frozen=True, slots=True)
class HostLimit:
    """The most memory this process may use."""

    nbytes: int
    source: str
    """Who set it: the machine, or a control group's file."""


def host_limit(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> HostLimit | None:
    """The smallest of the machine's memory and the limits of this process's control groups (versions 1 and 2).

    Reads a few files; at start only. `None` where the system tells nothing.
    """
    limits = [HostLimit(nbytes, str(path)) for path in _limit_files(proc, cgroups) if (nbytes := _read_bytes(path))]
    totals = [line.split()[1] for line in _read_lines(proc / "meminfo") if line.startswith("MemTotal:")]
    limits.extend(HostLimit(int(kib) * 1024, "the machine's memory") for kib in totals)
    return min(limits, key=lambda limit: limit.nbytes, default=None)


def check_host_memory(config: PrefixCacheConfig, limit: HostLimit | None) -> MemoryPlan:
    """Refuse a cache whose pinned pages cannot fit; warn of one whose pool may outgrow the limit.

    Further keys are not known yet when a cache is built: the pool counted here is the hidden rows'.

    Raises:
        HostMemoryError: names sizes, limit and settings; nothing was allocated.
    """
    plan = plan_memory(config, {HIDDEN_KEY: config.hidden_row_bytes})
    pinned, most, caches = plan.pinned_on_host_bytes, plan.most_on_host_bytes, plan.caches_per_host
    if limit is None:
        return plan
    if pinned > limit.nbytes:
        raise HostMemoryError(
            f"staging takes {plan.staging_bytes} bytes for each of {caches} caches on this host, {pinned} in all, "
            f"but {limit.source} allows {limit.nbytes}; lower staging_depth={config.staging_depth} or "
            f"max_num_tokens={config.max_num_tokens}"
        )
    level = logging.WARNING if most > limit.nbytes else logging.INFO
    logger.log(
        level,
        "caches on this host can come to %d bytes (%d each, num_blocks=%d x block_size=%d x %d bytes of hidden row; "
        "further keys come on top); %s allows %d%s",
        most,
        most // caches,
        config.num_blocks,
        config.block_size,
        config.hidden_row_bytes,
        limit.source,
        limit.nbytes,
        ". Give the engine fewer blocks, or the container more memory" if most > limit.nbytes else "",
    )
    return plan


def _limit_files(proc: Path, cgroups: Path) -> list[Path]:
    files = []
    for line in _read_lines(proc / "self" / "cgroup"):
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            files.extend(_up_to_root(cgroups, group, "memory.max"))
        elif "memory" in controllers.split(","):
            files.extend(_up_to_root(cgroups / "memory", group, "memory.limit_in_bytes"))
    return files


def _up_to_root(root: Path, group: str, name: str) -> list[Path]:
    parts = [part for part in group.split("/") if part]
    return [root.joinpath(*parts[:count], name) for count in range(len(parts), -1, -1)]


def _read_bytes(path: Path) -> int:
    text = "".join(_read_lines(path)).strip()
    if not text.isdigit() or int(text) >= _UNLIMITED_FROM_BYTES:
        return 0
    return int(text)


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
