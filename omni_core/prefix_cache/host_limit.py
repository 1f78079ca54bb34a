# SPDX-License-Identifier: Apache-2.0
"""What this process may use of the host's memory: the machine's, and its control groups' (versions 1 and 2)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

_UNLIMITED_FROM_BYTES = 1 << 60
"""cgroup v1 writes "no limit" as a number near 2**63."""
_MAX_DIGITS = 20
"""No count of bytes is longer."""
_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class HostLimit:
    """An upper bound on this process's memory."""

    nbytes: int
    source: str
    """Who set it: the machine, or a control group's file."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """What may be used at most, and what of it is free now. `None` where the system tells nothing."""

    limit: HostLimit | None
    available: HostLimit | None
    """Free now, file pages that can be dropped included; other processes may take it at any time."""
    before_any_start: bool = False
    """Whether no cache of the host has started: what is free now is for all of them, not for the one that asks."""

    def given_back(self, taken_bytes: int) -> HostMemory:
        """The host as it would be if the caller gave back what it has taken already."""
        if self.available is None or taken_bytes == 0:
            return self
        source = f"{self.available.source}, with the {taken_bytes} that this cache has already"
        return replace(self, available=HostLimit(self.available.nbytes + taken_bytes, source))


@dataclass(frozen=True, slots=True)
class _GroupFiles:
    """The names of one control-group version's files."""

    limit: str
    usage: str
    droppable: str
    """The line of `memory.stat` that counts file pages which are dropped when memory is short."""


_VERSION_1 = _GroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = _GroupFiles("memory.max", "memory.current", "inactive_file")


def host_memory(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> HostMemory:
    """The tightest bound of the machine and of every control group this process is in. Reads a few files; at start."""
    limits, free = [], []
    for folder, files in _groups(proc, cgroups):
        limit_bytes = _read_limit(folder / files.limit)
        if limit_bytes is None:
            continue
        limits.append(HostLimit(limit_bytes, str(folder / files.limit)))
        used_bytes = _read_limit(folder / files.usage)
        if used_bytes is not None:
            droppable_bytes = _read_table(folder / "memory.stat").get(files.droppable, 0)
            free_bytes = max(0, limit_bytes - max(0, used_bytes - droppable_bytes))
            free.append(HostLimit(free_bytes, f"{folder / files.limit} less {files.usage}"))
    machine = _read_table(proc / "meminfo")
    if "MemTotal:" in machine:
        limits.append(HostLimit(machine["MemTotal:"] * 1024, "the machine's memory"))
    if "MemAvailable:" in machine:
        free.append(HostLimit(machine["MemAvailable:"] * 1024, "the machine's free memory"))
    return HostMemory(min(limits, key=_size, default=None), min(free, key=_size, default=None))


def _size(limit: HostLimit) -> int:
    return limit.nbytes


def _groups(proc: Path, cgroups: Path) -> Iterator[tuple[Path, _GroupFiles]]:
    """This process's groups and all above them: a limit of any of them holds."""
    for line in _read_lines(proc / "self" / "cgroup"):
        _, _, rest = line.partition(":")
        controllers, colon, group = rest.partition(":")
        if not colon:
            continue
        if controllers == "":
            root, files = cgroups, _VERSION_2
        elif "memory" in controllers.split(","):
            root, files = cgroups / "memory", _VERSION_1
        else:
            continue
        parts = [part for part in group.split("/") if part]
        for count in range(len(parts), -1, -1):
            yield root.joinpath(*parts[:count]), files


def _read_limit(path: Path) -> int | None:
    """The number in a file; `None` if there is none, or it means "no limit"."""
    text = "".join(_read_lines(path)).strip()
    return int(text) if _is_number(text) and int(text) < _UNLIMITED_FROM_BYTES else None


def _read_table(path: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    rows = (line.split() for line in _read_lines(path))
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and _is_number(row[1])}


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
