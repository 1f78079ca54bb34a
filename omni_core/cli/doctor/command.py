# SPDX-License-Identifier: Apache-2.0
"""`omni-core doctor`: tries every backend on this machine, and says of each what to do next.

This process imports no torch and no vendor package: a broken one must not keep it from saying so.
"""

from __future__ import annotations

import argparse
import sys

from omni_core.cli.doctor.child import examine_apart
from omni_core.cli.doctor.host import look_at_host
from omni_core.cli.doctor.packages import PackageReport, survey_packages
from omni_core.cli.doctor.report import DoctorReport, as_json, as_text
from omni_core.cli.doctor.verdicts import BackendDiagnosis, diagnose, not_installed
from omni_core.cli.numbers import positive
from omni_core.cli.tables import JSON, add_format_argument, print_json
from omni_core.plugins import InstalledPlugin, PluginGroup

BACKEND_GROUP = "omni_core.backends"
"""As `omni_core.backend.registry` has it, which imports torch."""
_BACKENDS = PluginGroup(BACKEND_GROUP, "backend", LookupError, LookupError, ImportError)
_DEFAULT_LIMIT_S = 300.0


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to argparse's subparsers."""
    parser = subparsers.add_parser(
        "doctor",
        help="try every backend on this machine and say what to do next",
        description="Try every installed backend on this machine, each in a process of its own: is it available, what "
        "device, does it keep every promise of a backend, how fast it copies. Also: memory limits, and whether the "
        "installed torch, vLLM and vendor packages go together. Exit status 0: all is fine; 1: something is wrong "
        "with an available backend, or with the one named; 2: wrong usage. An unavailable backend is no failure unless "
        "it is named.",
    )
    parser.add_argument("--backend", metavar="NAME", help="only this one, and it must be ready (default: all)")
    parser.add_argument(
        "--limit-s",
        type=positive,
        default=_DEFAULT_LIMIT_S,
        metavar="SECONDS",
        help=f"most seconds one backend may take; it is ended then (default {_DEFAULT_LIMIT_S:g})",
    )
    add_format_argument(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Examine and print; 0 if what was asked for is fine, else 1."""
    packages = survey_packages()
    report = DoctorReport(look_at_host(), packages, _examine(args.backend, args.limit_s, packages), args.backend)
    if args.format == JSON:
        print_json(as_json(report))
    else:
        print("\n".join(as_text(report)))
    return 0 if report.ok else 1


def _examine(
    asked_for: str | None, limit_s: float, packages: tuple[PackageReport, ...]
) -> tuple[BackendDiagnosis, ...]:
    plugins = _BACKENDS.installed()
    wanted = [plugin for plugin in plugins if asked_for in (None, plugin.name)]
    if asked_for is not None and not wanted:
        return (not_installed(asked_for, plugins),)
    return tuple(_diagnosed(plugin, limit_s, packages) for plugin in wanted)


def _diagnosed(plugin: InstalledPlugin, limit_s: float, packages: tuple[PackageReport, ...]) -> BackendDiagnosis:
    if sys.stderr.isatty():
        print(f"trying {plugin.name} ...", file=sys.stderr)
    return diagnose(plugin.name, plugin, examine_apart(plugin.name, limit_s), packages)
