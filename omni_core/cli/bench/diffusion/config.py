# SPDX-License-Identifier: Apache-2.0
"""What `omni-core bench diffusion` runs: sizes, modes, workloads and step counts, from a JSON file or as they are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any

from omni_core.cli.bench.results import BenchmarkError
from omni_core.cli.plain_json import loads_without_repeats
from omni_core.diffusion_kv.config import AttentionOwnerKind


class BenchMode(Enum):
    """One column of the comparison."""

    DENSE = "dense"
    PAGED = "paged"
    PAGED_PREFIX = "paged+prefix"


class Workload(Enum):
    """What the requests of one run have in common."""

    SHARED = "shared-reference"
    """Every request is the same: the whole prefix is hit."""
    DISTINCT = "distinct-prompts"
    """The same pictures, another prompt each: the prefix is hit up to the end of the last picture."""


@dataclass(frozen=True, slots=True)
class DiffusionBenchConfig:
    """One run of the benchmark. The defaults are the figures this project publishes.

    Raises:
        BenchmarkError: a value of the wrong type or out of range.
    """

    layout: str = "big"
    """Of tiny-hunyuan: `big`, `small` or `debug`."""
    dtype: str = "float32"
    block_size: int = 32
    """Tokens per page."""
    attention_owner: str = AttentionOwnerKind.KERNEL.value
    """Of the paged modes: `kernel` (vLLM's CPU attention) or `gathered` (gathered pages and torch's attention)."""
    kv_cache_memory_bytes: int = 256 * 2**20
    """Pages of each paged engine."""
    modes: tuple[str, ...] = tuple(mode.value for mode in BenchMode)
    workloads: tuple[str, ...] = tuple(workload.value for workload in Workload)
    steps: tuple[int, ...] = (2, 4, 8, 50)
    """Denoise steps of the shared-reference workload, each its own run."""
    distinct_steps: tuple[int, ...] = (8,)
    """The same of the distinct-prompt workload."""
    requests: int = 8
    """Measured requests per mode and run."""
    warmups: int = 2
    """Requests before them, in no latency and no throughput."""
    long_steps: int = 50
    """From so many steps on a run has `long_requests` requests in place of `requests`."""
    long_requests: int = 3
    references: int = 2
    """Pictures of every request."""
    picture_pixels: int = 512
    """Sides of the pictures before preprocessing."""
    guidance_scale: float = 2.5
    """1.0 runs one row, anything else two."""
    seed: int = 42
    threads: int = 1
    """Of torch and of vLLM's kernel. More than one need as many idle processors: a thread waits for the slowest."""

    def __post_init__(self) -> None:
        for field in fields(self):
            _check_type(field.name, getattr(self, field.name))
        for name in _POSITIVE:
            if getattr(self, name) < 1:
                raise BenchmarkError(f"{name}={getattr(self, name)}; at least 1 is wanted")
        for name in ("warmups", "references", "seed"):
            if getattr(self, name) < 0:
                raise BenchmarkError(f"{name}={getattr(self, name)} is negative")
        if not math.isfinite(self.guidance_scale):
            raise BenchmarkError(f"guidance_scale={self.guidance_scale} is not a finite number")
        for name in ("steps", "distinct_steps"):
            if any(count < 1 for count in getattr(self, name)):
                raise BenchmarkError(f"{name}={list(getattr(self, name))}: every run has at least one step")
        for name, kind in _NAMES.items():
            known = tuple(member.value for member in kind)
            values = (self.attention_owner,) if name == "attention_owner" else getattr(self, name)
            unknown = [value for value in values if value not in known]
            if unknown or not values:
                raise BenchmarkError(f"{name}: {unknown or 'nothing'} is none of {', '.join(known)}")

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any]) -> DiffusionBenchConfig:
        """The configuration with these settings, the others as they are.

        Raises:
            BenchmarkError: an unknown name, or what the class itself refuses.
        """
        known = tuple(field.name for field in fields(cls))
        unknown = [name for name in settings if name not in known]
        if unknown:
            raise BenchmarkError(f"there is no setting {', '.join(map(repr, unknown))}; there is {', '.join(known)}")
        return cls(**{name: _as_tuple(value) for name, value in settings.items()})

    @classmethod
    def from_file(cls, path: Path) -> DiffusionBenchConfig:
        """The configuration of a JSON file.

        Raises:
            BenchmarkError: it cannot be read, is no JSON object, or names or sets something there is not.
        """
        try:
            settings = loads_without_repeats(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise BenchmarkError(f"--config {path}: {error}") from error
        if not isinstance(settings, dict):
            raise BenchmarkError(f"--config {path}: a JSON object is wanted, not {type(settings).__name__}")
        try:
            return cls.from_mapping(settings)
        except BenchmarkError as error:
            raise BenchmarkError(f"--config {path}: {error}") from error

    def requests_at(self, steps: int) -> int:
        """Measured requests of a run of so many steps."""
        return self.long_requests if steps >= self.long_steps else self.requests


_POSITIVE = (
    "block_size",
    "kv_cache_memory_bytes",
    "requests",
    "long_steps",
    "long_requests",
    "picture_pixels",
    "threads",
)
_NAMES: Mapping[str, type[Enum]] = MappingProxyType(
    {"attention_owner": AttentionOwnerKind, "modes": BenchMode, "workloads": Workload}
)
_STRINGS = frozenset({"layout", "dtype", "attention_owner"})
_LISTS: Mapping[str, type] = MappingProxyType({"modes": str, "workloads": str, "steps": int, "distinct_steps": int})


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _check_type(name: str, value: object) -> None:
    if name in _LISTS:
        fits = isinstance(value, tuple) and all(type(member) is _LISTS[name] for member in value)
        wanted = f"a list of {_LISTS[name].__name__}"
    elif name in _STRINGS:
        fits, wanted = type(value) is str, "str"
    elif name == "guidance_scale":
        fits, wanted = type(value) in (int, float), "float"
    else:
        fits, wanted = type(value) is int, "int"
    if not fits:
        raise BenchmarkError(f"{name}={value!r} is a {type(value).__name__}; {wanted} is wanted")


QUICK = DiffusionBenchConfig(
    layout="debug", steps=(2,), distinct_steps=(2,), requests=2, kv_cache_memory_bytes=8 * 2**20, picture_pixels=64
)
"""A few small requests, to see that it runs."""
