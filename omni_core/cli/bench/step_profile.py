# SPDX-License-Identifier: Apache-2.0
"""Which module a small step's time goes to: the profile behind the target for one request."""

from __future__ import annotations

import cProfile
import pstats
from collections import defaultdict
from pathlib import PurePath
from typing import Any, cast

from omni_core.cli.bench.driver import Driver
from omni_core.cli.bench.engine_batch import DecodeBatch, StageShape
from omni_core.cli.bench.plan import Plan
from omni_core.cli.bench.results import MS_PER_S, Row, with_interval
from omni_core.cli.bench.samples import Samples
from omni_core.cli.bench.stage import OURS, OurStage
from omni_core.cli.bench.threads import MeteredRuntime

PROFILE = "profile"
PROFILED_REQUESTS = 1
NUM_STEPS = 2_000
LEAST_SHARE_PERCENT = 2.0
_PACKAGES = ("omni_core", "omni_core_cpu_sim")
_US_PER_MS = 1e3
_BUILTIN_FILE = "~"

NOTE = (
    f"{PROFILE}: a step of {PROFILED_REQUESTS} request, others at rest, by module. cProfile gives the shares: C "
    "functions count to the module that calls them, and what the profile costs, much the same per call, is in it; "
    f"us: the share of a step timed without it. Modules below {LEAST_SHARE_PERCENT:g} % are left out"
)

_Function = tuple[str, int, str]


def profile_step(plan: Plan) -> list[Row]:
    """One row per module, the most expensive first."""
    shape = StageShape(DecodeBatch.num_blocks(PROFILED_REQUESTS), PROFILED_REQUESTS)
    runtime, samples, profile = MeteredRuntime(), Samples(), cProfile.Profile()
    stage = OurStage(shape, runtime)
    driver = Driver(stage, DecodeBatch(shape, PROFILED_REQUESTS), runtime)
    try:
        for number in range(plan.rounds(NUM_STEPS, 4)):
            took_s: list[float] = []
            stage.deliver(driver.run_at_rest(took_s.append)).release()
            samples.add(OURS, number, took_s[0])
            driver.make_room(1)
            stage.prepare(driver.batch.next_step())
            step_id = profile.runcall(stage.run_step)
            stage.deliver(step_id).release()
    finally:
        driver.close()
        stage.close()
    whole = with_interval("ours_ms", samples.median_s(OURS), MS_PER_S)
    shares = module_shares(profile)
    total: Row = {
        "what": PROFILE,
        "requests": PROFILED_REQUESTS,
        "module": "the whole step",
        "rounds": samples.count(OURS),
    }
    rows = [{**total, **whole, "share_percent": 100.0, "us": whole["ours_ms"] * _US_PER_MS}]
    for module, share in sorted(shares.items(), key=lambda item: -item[1]):
        if share * 100 >= LEAST_SHARE_PERCENT:
            us = share * whole["ours_ms"] * _US_PER_MS
            rows.append({"what": PROFILE, "module": module, "share_percent": share * 100, "us": us})
    return rows


def module_shares(profile: cProfile.Profile) -> dict[str, float]:
    """Module → its share of the time that was profiled. C functions count to their callers."""
    seconds: defaultdict[str, float] = defaultdict(float)
    # typeshed does not know the table that pstats' own documentation prints from.
    table = cast("Any", pstats.Stats(profile)).stats
    function: _Function
    for function, (_, _, own_s, _, callers) in table.items():
        if function[0] != _BUILTIN_FILE:
            seconds[_module(function)] += own_s
            continue
        for caller, (_, _, called_s, _) in callers.items():
            seconds[_module(caller)] += called_s
    total_s = sum(seconds.values())
    return {module: own_s / total_s for module, own_s in seconds.items()}


def _module(function: _Function) -> str:
    """`prefix_cache.step_saver` for a module of ours; the package's name for another's."""
    path = PurePath(function[0]).with_suffix("")
    for package in _PACKAGES:
        if package in path.parts:
            inside = path.parts[len(path.parts) - path.parts[::-1].index(package) :]
            return ".".join(inside if package == _PACKAGES[0] else (package, *inside))
    if "site-packages" in path.parts:
        return path.parts[path.parts.index("site-packages") + 1]
    return path.name
