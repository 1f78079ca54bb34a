# SPDX-License-Identifier: Apache-2.0
"""The examination as text and as JSON."""

from __future__ import annotations

import dataclasses
import platform
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import omni_core
from omni_core.cli.doctor.host import HostReport
from omni_core.cli.doctor.packages import PackageReport
from omni_core.cli.doctor.verdicts import BackendDiagnosis, Verdict
from omni_core.prefix_cache.host_limit import HostLimit

_GIB = 1 << 30
_WIDTH = 110
_SHOWN_FAILURES = 5


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """Everything the command found."""

    host: HostReport
    packages: tuple[PackageReport, ...]
    backends: tuple[BackendDiagnosis, ...]
    asked_for: str | None
    """The backend named by --backend."""

    @property
    def ok(self) -> bool:
        """Whether every backend that was asked for is fine; unnamed, an unavailable one is."""
        fine = {Verdict.READY} if self.asked_for is not None else {Verdict.READY, Verdict.UNAVAILABLE}
        return bool(self.backends) and all(backend.verdict in fine for backend in self.backends)


def as_json(report: DoctorReport) -> dict[str, Any]:
    """The document of `--format json`."""
    host = report.host
    return {
        "ok": report.ok,
        "omni_core": omni_core.__version__,
        "python": platform.python_version(),
        "host": {
            "memory_limit": _limit_as_json(host.memory_limit),
            "memory_available": _limit_as_json(host.memory_available),
            "locked_limit_bytes": host.locked_limit_bytes,
            "locked_limit_hard_bytes": host.locked_limit_hard_bytes,
        },
        "packages": [dataclasses.asdict(package) for package in report.packages],
        "backends": [_backend_as_json(backend) for backend in report.backends],
    }


def as_text(report: DoctorReport) -> Iterator[str]:
    """Lines for people."""
    yield f"omni-core {omni_core.__version__}, Python {platform.python_version()}"
    yield from _draw_host(report.host)
    yield ""
    yield "Packages"
    for package in report.packages:
        yield f"  {package.name:<12} {_package_words(package)}"
        if package.problem is not None:
            yield from _wrapped(f"WARNING: {package.problem}. To do: {package.remedy}.", indent=15)
    for backend in report.backends:
        yield ""
        yield from _draw_backend(backend)
    yield ""
    yield _last_line(report)


def _draw_host(host: HostReport) -> Iterator[str]:
    yield ""
    yield "Host"
    yield f"  {'memory':<12} {_limit_words(host.memory_limit)}"
    yield f"  {'free now':<12} {_limit_words(host.memory_available)}"
    locked = "no limit" if host.locked_limit_bytes is None else f"at most {_gib(host.locked_limit_bytes)}"
    yield f"  {'page-locked':<12} {locked} (RLIMIT_MEMLOCK)"


def _draw_backend(backend: BackendDiagnosis) -> Iterator[str]:
    found, installed = backend.examination, backend.installed
    source = "" if installed is None else f" ({installed.distribution} {installed.version})"
    yield f"Backend {backend.name}{source}: {backend.verdict.value.upper()}"
    yield from _wrapped(backend.summary)
    if found.device is not None:
        device = found.device
        yield (
            f"  {'device':<12} {device['name']} ({device['device']}), {_gib(device['free_memory_bytes'])} free of "
            f"{_gib(device['total_memory_bytes'])}"
        )
        if device["software"]:
            yield f"  {'software':<12} {', '.join(f'{name} {value}' for name, value in device['software'].items())}"
    if found.capabilities is not None:
        cannot = [name for name, can in found.capabilities.items() if not can]
        yield f"  {'cannot':<12} {', '.join(cannot) or 'nothing: it has every capability'}"
    if found.pinned_bytes_per_s is not None and found.pageable_bytes_per_s is not None:
        yield (
            f"  {'copies':<12} {found.pinned_bytes_per_s / 1e9:.1f} GB/s into arenas, "
            f"{found.pageable_bytes_per_s / 1e9:.1f} GB/s into ordinary memory"
        )
    for name, why in list(found.failed.items())[:_SHOWN_FAILURES]:
        yield f"  FAILED {name}"
        yield from _wrapped(why, indent=4)
    if len(found.failed) > _SHOWN_FAILURES:
        yield f"  and {len(found.failed) - _SHOWN_FAILURES} more; --format json has all"
    yield from _wrapped(f"Next: {backend.next_step}")


def _last_line(report: DoctorReport) -> str:
    bad = [backend.name for backend in report.backends if backend.verdict is not Verdict.READY]
    ready = [backend.name for backend in report.backends if backend.verdict is Verdict.READY]
    if not report.backends:
        return "No backend is installed. Install omni-core; from a source tree, run `pip install -e .`."
    if report.ok:
        return f"Ready: {', '.join(ready) or 'none'}." + (f" Not on this machine: {', '.join(bad)}." if bad else "")
    wrong = [one.name for one in report.backends if one.name in bad and (one.is_available or report.asked_for)]
    return f"Something is wrong: {', '.join(wrong)}. See above."


def _backend_as_json(backend: BackendDiagnosis) -> dict[str, Any]:
    installed = backend.installed
    return {
        "name": backend.name,
        "distribution": None if installed is None else installed.distribution,
        "version": None if installed is None else installed.version,
        "entry_point": None if installed is None else installed.entry_point,
        "available": backend.is_available,
        "verdict": backend.verdict.value,
        "summary": backend.summary,
        "next_step": backend.next_step,
        **dataclasses.asdict(backend.examination),
    }


def _limit_as_json(limit: HostLimit | None) -> dict[str, Any] | None:
    return None if limit is None else {"nbytes": limit.nbytes, "source": limit.source}


def _limit_words(limit: HostLimit | None) -> str:
    return "unknown" if limit is None else f"{_gib(limit.nbytes)} ({limit.source})"


def _package_words(package: PackageReport) -> str:
    return "not installed" if package.version is None else f"{package.version} ({package.distribution})"


def _gib(nbytes: int) -> str:
    return f"{nbytes / _GIB:.1f} GiB" if nbytes >= _GIB // 10 else f"{nbytes} bytes"


def _wrapped(text: str, *, indent: int = 2) -> Iterator[str]:
    yield from textwrap.wrap(text, _WIDTH, initial_indent=" " * indent, subsequent_indent=" " * indent)
