# SPDX-License-Identifier: Apache-2.0
"""`omni-core bench`: what the cache costs, beside the copies nobody can avoid and beside the peer."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from omni_core.cli.bench.benchmarks import BENCHMARKS, BY_NAME, run_benchmark
from omni_core.cli.bench.peer.install import PEER_REQUIREMENT, install_peer, peer_home
from omni_core.cli.bench.peer.package import PeerPackage
from omni_core.cli.bench.plan import Plan, say
from omni_core.cli.bench.report import render_text, write_files
from omni_core.cli.bench.results import BenchmarkError
from omni_core.cli.demo.child import DemoError
from omni_core.cli.numbers import positive
from omni_core.cli.tables import JSON, add_format_argument, print_failure, print_json

EXIT_FAILED = 1
ALL = "all"
SECONDS_PER_MINUTE = 60


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to argparse's subparsers."""
    parser = subparsers.add_parser(
        "bench",
        help="measure what the cache costs, beside a copy of the same bytes and beside the peer",
        description="Measure on this machine's CPU, with the simulated backend, what the cache costs, and hold it "
        "against the project's targets. Run it on a quiet machine. Exit status 0 if everything was measured, whatever "
        "the verdicts; 1 if not.",
        epilog="; ".join(f"{benchmark.name}: {benchmark.summary}" for benchmark in BENCHMARKS)
        + f"; {ALL}: every one, each in a process of its own.",
    )
    parser.add_argument("name", choices=(ALL, *BY_NAME), metavar="NAME", help="which benchmark, see below")
    parser.add_argument(
        "--peer",
        action="store_true",
        help=f"measure {PEER_REQUIREMENT} beside it; installed without its dependencies into {peer_home()} once",
    )
    parser.add_argument(
        "--quick", action="store_true", help="a few rounds, to see that it runs; the figures mean nothing"
    )
    parser.add_argument(
        "--skip", action="append", choices=tuple(BY_NAME), default=[], metavar="NAME", help=f"leave it out of {ALL}"
    )
    parser.add_argument(
        "--limit-minutes",
        type=positive,
        default=40.0,
        metavar="N",
        help="how long vllm goes on at most until its ratios are known within 2 %% (%(default)g)",
    )
    parser.add_argument("--model", type=Path, metavar="PATH", help="a model directory for vllm, in place of the demo's")
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="sizes, modes, workloads and steps of diffusion, as JSON"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="also write JSON, a Markdown page and plots there")
    add_format_argument(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print; 0 if all that was asked for was measured."""
    try:
        if args.out is not None:
            args.out.mkdir(parents=True, exist_ok=True)  # not after an hour of measuring
        documents = _measure(args)
    except (BenchmarkError, DemoError, OSError) as error:
        print_failure("bench", args.format, str(error))
        return EXIT_FAILED
    measured = [document for document in documents if document is not None]
    if args.format == JSON:
        print_json(measured[0] if args.name != ALL else {"benchmarks": measured})
    else:
        print("\n\n\n".join(map(render_text, measured)))
    if args.out is not None:
        for omission in write_files(measured, args.out):
            say(omission)
    return 0 if len(measured) == len(documents) else EXIT_FAILED


def _measure(args: argparse.Namespace) -> list[dict[str, Any] | None]:
    """A document per benchmark; `None` for one of several that failed."""
    peer_folder = install_peer(peer_home()) if args.peer else None
    if args.name == ALL:
        return [_in_child(name, args) for name in BY_NAME if name not in args.skip]
    peer = None if peer_folder is None else PeerPackage(peer_folder)
    plan = Plan(args.quick, peer, args.limit_minutes * SECONDS_PER_MINUTE, args.model, args.config)
    return [run_benchmark(BY_NAME[args.name], plan)]


def _in_child(name: str, args: argparse.Namespace) -> dict[str, Any] | None:
    """One benchmark in a fresh process, so that it inherits no memory and no threads; `None` if it failed."""
    options = [option for option, given in (("--peer", args.peer), ("--quick", args.quick)) if given]
    options += ["--limit-minutes", str(args.limit_minutes)]
    options += [] if args.model is None else ["--model", str(args.model)]
    options += [] if args.config is None else ["--config", str(args.config)]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "omni_core.cli.main", "bench", name, "--format", JSON, *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        check=False,
    )
    if done.returncode != 0:
        say(f"omni-core bench: {name} ended with status {done.returncode} and is left out")
        return None
    document: dict[str, Any] = json.loads(done.stdout)
    return document
