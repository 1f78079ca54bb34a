# SPDX-License-Identifier: Apache-2.0
"""`omni-core backends`: what is installed, and what this machine can run."""

from __future__ import annotations

import argparse
from typing import Any

from omni_core.backend.registry import BACKEND_GROUP, BackendReport, explain_backends
from omni_core.cli.tables import JSON, add_format_argument, print_json, render_table


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to argparse's subparsers."""
    parser = subparsers.add_parser(
        "backends",
        help="list the installed backends and whether this machine can run them",
        description="List every backend registered under the entry-point group "
        f"{BACKEND_GROUP}, its distribution, and whether this machine can run it. "
        "Exit status 1 if it can run none.",
    )
    add_format_argument(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the list; 0 if this machine can run at least one backend, else 1."""
    reports = explain_backends()
    if args.format == JSON:
        print_json({"backends": [_as_json(report) for report in reports]})
    elif reports:
        print(render_table(("name", "distribution", "available", "reason"), [_as_cells(report) for report in reports]))
    else:
        print(f"no installed distribution registers a backend under {BACKEND_GROUP}")
    return 0 if any(report.available for report in reports) else 1


def _as_cells(report: BackendReport) -> tuple[str, str, str, str]:
    plugin = report.installed
    note = report.reason or (f"refuses {report.refuses}" if report.refuses else "")
    return plugin.name, f"{plugin.distribution} {plugin.version}", "yes" if report.available else "no", note


def _as_json(report: BackendReport) -> dict[str, Any]:
    plugin = report.installed
    return {
        "name": plugin.name,
        "distribution": plugin.distribution,
        "version": plugin.version,
        "entry_point": plugin.entry_point,
        "device_type": report.device_type,
        "available": report.available,
        "reason": report.reason,
        "refuses": report.refuses,
    }
