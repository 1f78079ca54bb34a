# SPDX-License-Identifier: Apache-2.0
"""`contention`: what builder threads that materialise beside the engine thread cost it."""

from __future__ import annotations

import os
from contextlib import ExitStack
from functools import partial

from omni_core.cli.bench.driver import Driver
from omni_core.cli.bench.engine_batch import DecodeBatch, StageShape
from omni_core.cli.bench.plan import Plan, say
from omni_core.cli.bench.plots import Chart
from omni_core.cli.bench.results import MS_PER_S, Measured, Relation, Row, Target, with_interval
from omni_core.cli.bench.samples import Samples
from omni_core.cli.bench.stage import OurStage
from omni_core.cli.bench.threads import MeteredRuntime

NUM_REQUESTS, QUICK_REQUESTS = 256, 4
SEGMENTS, QUICK_SEGMENTS = 60, 2
SEGMENT_STEPS, QUICK_SEGMENT_STEPS = 25, 3
WARM_UP_STEPS = 8
QUIET = "0"

TARGETS = (Target("one builder over quiet", "ratio", Relation.AT_MOST, 1.5, {"builders": 1, "requests": NUM_REQUESTS}),)

CHARTS = (Chart("contention", "a step beside builders (CPU)", "builders", {"ours_ms": "ours"}, "ms"),)

NOTES = (
    "quiet (0 builders): each step with every other thread idle; with builders: without a pause, as in engine-step",
    "ratio: the median step over the quiet one",
)


def measure(plan: Plan) -> Measured:
    """No builder, one, and so on up to the number of processors less one."""
    say("contention")
    num_requests = plan.rounds(NUM_REQUESTS, QUICK_REQUESTS)
    steps = plan.rounds(SEGMENT_STEPS, QUICK_SEGMENT_STEPS)
    most_builders = max(1, len(os.sched_getaffinity(0)) - 1)
    shape = StageShape(DecodeBatch.num_blocks(num_requests), num_requests)
    samples = Samples()
    with ExitStack() as stack:
        drivers: dict[int, Driver] = {}
        for builders in range(most_builders + 1):
            runtime = MeteredRuntime()
            stage = OurStage(shape, runtime)
            stack.callback(stage.close)
            drivers[builders] = Driver(stage, DecodeBatch(shape, num_requests), runtime, max(1, builders))
            stack.callback(drivers[builders].close)
            drivers[builders].run(WARM_UP_STEPS, lambda step, seconds: None)
        for segment in range(plan.rounds(SEGMENTS, QUICK_SEGMENTS)):
            for builders, driver in drivers.items():
                _run_segment(driver, builders, samples, segment * steps, steps)
    rows = [_row(samples, builders, num_requests) for builders in drivers]
    return Measured(tuple(rows), (*plan.notes, *NOTES))


def _run_segment(driver: Driver, builders: int, samples: Samples, first_round: int, steps: int) -> None:
    if builders:
        driver.run(steps, lambda step, seconds: samples.add(str(builders), first_round + step, seconds))
        return
    for number in range(first_round, first_round + steps):
        step_id = driver.run_at_rest(partial(samples.add, QUIET, number))
        driver.stage.deliver(step_id).release()


def _row(samples: Samples, builders: int, num_requests: int) -> Row:
    name = str(builders)
    row: Row = {"builders": builders, "requests": num_requests, "rounds": samples.count(name)}
    row |= with_interval("ours_ms", samples.median_s(name), MS_PER_S)
    return row if name == QUIET else row | with_interval("ratio", samples.ratio(name, QUIET))
