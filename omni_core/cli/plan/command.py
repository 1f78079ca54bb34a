# SPDX-License-Identifier: Apache-2.0
"""`omni-core plan`: what a stage will cost in host and device memory, whether that fits, and what to change."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from omni_core.backend.host_pages import measure_commit_rate
from omni_core.cli.plan.arguments import add_arguments, given_settings, refuse_ignored, unused_if_live
from omni_core.cli.plan.errors import PlanInputError
from omni_core.cli.plan.model_config import read_stage_model
from omni_core.cli.plan.report import FirstSave, PlanReport, WaysOut, as_json, as_text
from omni_core.cli.plan.running_engine import DEFAULT_TIMEOUT_S, RunningEngine, ask_engine
from omni_core.cli.plan.running_stage import running_plan, running_sizes, told_settings
from omni_core.cli.plan.stage import planned_stage, sink_bytes_of
from omni_core.cli.setting_sources import resolve_settings
from omni_core.cli.tables import JSON, print_json
from omni_core.prefix_cache.host_limit import HostLimit, HostMemory, host_memory
from omni_core.prefix_cache.host_memory import NO_SINGLE_SETTING, Fit, growth_problem, judge_fit
from omni_core.prefix_cache.sizing import HostPlan, StageSizes
from omni_core.runtime import ThreadingRuntime
from omni_core.settings.errors import SettingsError
from omni_core.settings.stage_settings import StageSettings

EXIT_FITS = 0
EXIT_DOES_NOT_FIT = 1
EXIT_WRONG_USAGE = 2


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to argparse's subparsers."""
    parser = subparsers.add_parser(
        "plan",
        help="what a stage will cost in host and device memory, whether it fits, and what to change",
        description="Say what a stage with a prefix cache costs in host and device memory, before it is started or "
        "while it runs, against what the machine and the container allow. Settings come from the arguments, the "
        "environment and the configuration file, as a worker reads them.",
        epilog="Exit status: 0 it fits; 1 it does not; 2 wrong usage.",
    )
    add_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the plan; 0 if it fits, 1 if not, 2 if it cannot be made."""
    try:
        report = _report(args)
    except (PlanInputError, SettingsError) as error:
        print(f"omni-core plan: {error}", file=sys.stderr)
        return EXIT_WRONG_USAGE
    if args.format == JSON:
        print_json(as_json(report))
    else:
        print("\n".join(as_text(report)))
    return EXIT_FITS if report.fits else EXIT_DOES_NOT_FIT


def _report(args: argparse.Namespace) -> PlanReport:
    refuse_ignored(args)
    settings = resolve_settings(args, given_settings(args)).stage()
    model = None if args.model is None else read_stage_model(args.model, args.stage_config, args.dtype)
    engine = _asked_engine(args)
    host = replace(host_memory(), before_any_start=True)
    if args.host_bytes is not None:
        host = HostMemory(HostLimit(args.host_bytes, "--host-bytes"), None)
    if engine is not None and engine.stages:
        return _live_report(args, engine, settings, host)
    stage = planned_stage(args, settings, model, engine)
    fit = judge_fit(stage.sizes, host, room_for_every_key=True)
    found = (fit.refusal, fit.warning, _staging_problem(stage.sizes))
    problems = tuple(problem for problem in found if problem is not None)
    notes = stage.notes if engine is None else (*stage.notes, f"no live figures of {engine.url}: {engine.no_stages}")
    return PlanReport(
        sizes=stage.sizes,
        plan=fit.plan,
        live=False,
        sources=stage.sources,
        host=host,
        first_save=_first_save(fit.plan, step_row_bytes=_step_row_bytes(stage.sizes)),
        problems=problems,
        ways=_ways_out(fit) if problems else WaysOut(),
        notes=notes,
    )


def _asked_engine(args: argparse.Namespace) -> RunningEngine | None:
    if args.server is None:
        return None
    return ask_engine(ThreadingRuntime(), args.server, args.server_timeout_s or DEFAULT_TIMEOUT_S)


def _live_report(
    args: argparse.Namespace, engine: RunningEngine, settings: StageSettings, host: HostMemory
) -> PlanReport:
    """What the largest of the caches that a server tells has allocated; the others are taken to be alike."""
    stage = engine.stages[0]
    told = told_settings(stage.settings, settings)
    sink_bytes, unknown = sink_bytes_of(args, told)
    plan = running_plan(
        stage.memory,
        told,
        caches_per_host=args.caches_per_host or engine.num_caches,
        device_is_host=stage.device_is_host,
        sink_bytes=sink_bytes,
        beside_bytes=args.beside,
    )
    # What is free now has the running caches taken out already.
    limit_only = replace(host, available=None)
    problem = growth_problem(plan, limit_only)
    row_bytes = sum(stage.memory.pool_bytes.values()) // max(1, engine.num_blocks * engine.block_size)
    return PlanReport(
        sizes=None,
        plan=plan,
        live=True,
        sources=(f"{engine.url}: {engine.num_blocks:,} blocks of {engine.block_size} tokens",),
        host=limit_only,
        first_save=_first_save(plan, step_row_bytes=row_bytes * args.max_num_tokens),
        problems=() if problem is None else (problem,),
        ways=WaysOut() if problem is None else _ways_out_live(running_sizes(stage.geometry, plan, told), limit_only),
        notes=(
            "keys that were not saved yet come on top",
            *unknown,
            *(() if args.caches_per_host else engine.not_seen),
            *unused_if_live(args),
        ),
    )


def _ways_out(fit: Fit) -> WaysOut:
    return WaysOut(fit.remedies, fit.pair, fit.start_remedies, None if fit.remedies else NO_SINGLE_SETTING)


def _ways_out_live(sizes: StageSizes | None, host: HostMemory) -> WaysOut:
    if sizes is None:
        return WaysOut(advice="The stage does not tell its sizes: describe it without --server, to see what to change")
    return _ways_out(judge_fit(sizes, host))


def _first_save(plan: HostPlan, *, step_row_bytes: int) -> FirstSave:
    rate = measure_commit_rate(ThreadingRuntime().monotonic_s)
    return FirstSave(
        commit_bytes_per_s=rate,
        start_s=plan.start_bytes / rate,
        step_s=step_row_bytes / rate,
        pretouch_s=sum(plan.cache.pool_bytes.values()) / rate,
    )


def _step_row_bytes(sizes: StageSizes) -> int:
    return sizes.config.max_num_tokens * sum(sizes.stored_row_bytes.values())


def _staging_problem(sizes: StageSizes) -> str | None:
    if not sizes.missing_row_bytes:
        return None
    return (
        "a largest step with a row of every key has no room in a staging page: raise extra_row_bytes from "
        f"{sizes.config.extra_row_bytes} to {sizes.with_row_room.config.extra_row_bytes}"
    )
