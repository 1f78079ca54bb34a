# SPDX-License-Identifier: Apache-2.0
"""`engine-step`: what a decode step costs the engine thread, and what its delivery costs the consumer."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np

from omni_core.cli.bench.driver import FLOOR, Driver, comparison
from omni_core.cli.bench.engine_batch import DecodeBatch, StageShape
from omni_core.cli.bench.floors import Copies
from omni_core.cli.bench.plan import Plan, say
from omni_core.cli.bench.plots import Chart
from omni_core.cli.bench.results import MS_PER_S, Measured, Relation, Row, Target, with_interval
from omni_core.cli.bench.samples import Samples
from omni_core.cli.bench.stage import OURS, OurStage
from omni_core.cli.bench.step_profile import NOTE, profile_step
from omni_core.cli.bench.threads import COMMITTER, MeteredRuntime, Sleepers
from omni_core.runtime import ThreadingRuntime

BUSY, REST, TAKING, SLOPE = "engine step", "engine step, others at rest", "materialize", "slope"
WAKING = "waking two threads"
NUM_WAKINGS = 2000
US_PER_S = 1e6

SIZES = (1, 8, 64, 256, 1024)
QUICK_SIZES = (1, 4)
SLOPE_MOST_REQUESTS = 256
FULL_STEPS = 10_000
SEGMENT_STEPS = 50
"""Steps of ours without a pause, before the other sides have their turn."""
WARM_UP_STEPS = 8
PEER_STEPS = {1: 5, 8: 5, 64: 5, 256: 2, 1024: 1}
"""Requests → steps of each peer per segment. They are long, and a run must end."""

TARGETS = (
    Target("256 requests", "ours_ms", Relation.AT_MOST, 0.34, {"what": BUSY, "requests": 256}),
    Target("1 request", "ours_ms", Relation.AT_MOST, 0.06, {"what": BUSY, "requests": 1}),
    *(
        Target(
            f"256 requests, {peer} over ours",
            f"{peer}_ratio",
            Relation.AT_LEAST,
            120.0,
            {"what": BUSY, "requests": 256},
        )
        for peer in ("peer_eager", "peer_async")
    ),
    Target("materialize, 256 requests", "ours_ms", Relation.AT_MOST, 0.7, {"what": TAKING, "requests": 256}),
    Target("steps that found no free staging slot", "staging_full", Relation.AT_MOST, 0, {"what": BUSY}),
    Target("committer's CPU over the engine thread's", "committer_ratio", Relation.AT_MOST, 2.0, {"what": BUSY}),
    Target("each further request", "slope_us", Relation.AT_MOST, 1.0, {"what": SLOPE}),
)

_SIDES = {
    "ours_ms": "ours",
    "peer_eager_ms": "peer, eager",
    "peer_async_ms": "peer, asynchronous",
    "floor_ms": "floor",
}
CHARTS = tuple(
    Chart(name, f"{what} (CPU)", "requests", _SIDES, "ms", {"what": what}, logarithmic=True)
    for name, what in (("engine-step", BUSY), ("engine-step-at-rest", REST), ("materialize", TAKING))
)

NOTES = (
    f"{BUSY}: new_step_starts and save_outputs without a pause, while a builder thread materialises and the helper "
    "threads copy and store; before a step the driver waits, untimed, until the builder has left two staging slots "
    "free (held_back: how often)",
    "staging_full: steps that began with every staging slot in use all the same, because the committer was late",
    "layout_us: the median of the part of ours that finds the step's slots in the block table; it is the benchmark's "
    "own code, in the place of the runner's",
    f"{WAKING}: two notifications of threads that sleep; a step wakes the committer, and one of more than 64 KiB the "
    "simulated backend's copy thread, so this is part of the floor of a step",
    f"{REST}: the same with every other thread idle; {TAKING}: on an idle machine, release included",
    "floor: one clone and one staging copy of the step's bytes, for materialize one copy; one thread, everything warm",
    "ratio: ours over the floor; peer_..._ratio: the peer over ours, of the rounds that have both",
    NOTE,
)


def measure(plan: Plan) -> Measured:
    """Decode steps of every batch size."""
    rows: list[Row] = []
    busy: dict[int, Samples] = {}
    for num_requests in QUICK_SIZES if plan.quick else SIZES:
        say(f"engine-step: {num_requests} requests")
        run = _BatchSize(plan, num_requests)
        run.measure()
        rows.extend(run.rows())
        busy[num_requests] = run.busy
    rows.append(_waking(plan))
    sloped = {size: samples for size, samples in busy.items() if size <= SLOPE_MOST_REQUESTS}
    if len(sloped) > 1:
        rows.append(_slope(sloped))
    rows.extend(profile_step(plan))
    return Measured(tuple(rows), (*plan.notes_beside_peer, *NOTES))


class _BatchSize:
    """All sides at one batch size, in turns."""

    def __init__(self, plan: Plan, num_requests: int) -> None:
        self._plan = plan
        self._num_requests = num_requests
        self._shape = StageShape(DecodeBatch.num_blocks(num_requests), num_requests)
        self._copies = Copies(num_requests * self._shape.row_bytes)
        self._runtime = MeteredRuntime()
        self.busy, self._rest, self._taking = Samples(), Samples(), Samples()
        self._committer_s = 0.0
        self._counts: Row = {}

    def measure(self) -> None:
        """Fill the samples."""
        steps = self._plan.rounds(SEGMENT_STEPS, 3)
        peer_steps = self._plan.rounds(PEER_STEPS.get(self._num_requests, 1), 1)
        with self._plan.sides(self._shape, self._runtime) as sides, ExitStack() as stack:
            drivers = [Driver(side, DecodeBatch(self._shape, self._num_requests), self._runtime) for side in sides]
            for driver in drivers:
                stack.callback(driver.close)
                driver.run(WARM_UP_STEPS, lambda step, seconds: None)
            drivers[0].forget_counts()
            for segment in range(self._plan.rounds(FULL_STEPS // SEGMENT_STEPS, 2)):
                for driver in drivers:
                    self._steps_without_pause(driver, segment * steps, steps if driver is drivers[0] else peer_steps)
                for index in range(steps):
                    self.busy.time(FLOOR, segment * steps + index, self._copies.clone_and_stage)
                for driver in drivers:
                    self._step_at_rest(driver, segment)
            self._count(drivers[0])

    def _steps_without_pause(self, driver: Driver, first_round: int, steps: int) -> None:
        name = driver.stage.name
        driver.make_room(steps)
        committer_s = self._committer_cpu_s(driver)
        driver.run(steps, lambda step, seconds: self.busy.add(name, first_round + step, seconds))
        self._committer_s += self._committer_cpu_s(driver) - committer_s

    def _step_at_rest(self, driver: Driver, number: int) -> None:
        """One step, one delivery, and for ours the floors; who goes first alternates, for the second is warmer."""
        stage = driver.stage
        with_floor = isinstance(stage, OurStage)
        if with_floor and number % 2:
            self._floors(number)
        step_id = driver.run_at_rest(lambda seconds: self._rest.add(stage.name, number, seconds))
        self._taking.time(stage.name, number, lambda: stage.deliver(step_id).release())
        if with_floor and not number % 2:
            self._floors(number)

    def _floors(self, number: int) -> None:
        self._rest.time(FLOOR, number, self._copies.clone_and_stage)
        self._taking.time(FLOOR, number, self._copies.copy)

    def _committer_cpu_s(self, driver: Driver) -> float:
        """CPU time of our committer so far; 0 for the peer, whose committer is not metered."""
        return self._runtime.cpu_s(COMMITTER) if isinstance(driver.stage, OurStage) else 0.0

    def _count(self, ours: Driver) -> None:
        steps = self.busy.count(OURS)
        layout_s = ours.stage.layout_s if isinstance(ours.stage, OurStage) else [0.0]
        self._counts = {
            "staging_full": ours.staging_full,
            "held_back": ours.held_back,
            "layout_us": float(np.median(layout_s)) * US_PER_S,
            "engine_cpu_us": ours.engine_cpu_s / steps * US_PER_S,
            "committer_cpu_us": self._committer_s / steps * US_PER_S,
            "committer_ratio": self._committer_s / ours.engine_cpu_s,
        }

    def rows(self) -> list[Row]:
        """One row per condition."""
        return [
            self._row(BUSY, self.busy) | self._counts,
            self._row(REST, self._rest),
            self._row(TAKING, self._taking),
        ]

    def _row(self, what: str, samples: Samples) -> Row:
        row: Row = {"what": what, "requests": self._num_requests, "rounds": samples.count(OURS)}
        return row | comparison(samples, self._plan.peer_names)


def _waking(plan: Plan) -> Row:
    """What an engine thread pays for waking the copy's thread and the committer, whatever the step brings."""
    runtime, samples = ThreadingRuntime(), Samples()
    sleepers = Sleepers(runtime, 2)
    try:
        for number in range(plan.rounds(NUM_WAKINGS, 5)):
            sleepers.settle()
            samples.time(FLOOR, number, sleepers.wake)
    finally:
        sleepers.close()
    row: Row = {"what": WAKING, "rounds": samples.count(FLOOR)}
    return row | with_interval("floor_ms", samples.median_s(FLOOR), MS_PER_S)


def _slope(busy: dict[int, Samples]) -> Row:
    """What each further request adds to a step, between the smallest and the largest batch."""
    fewest, most = min(busy), max(busy)
    ends = Samples()
    ends.take_over("fewest", busy[fewest], OURS)
    ends.take_over("most", busy[most], OURS)
    per_request = US_PER_S / (most - fewest)
    return {
        "what": SLOPE,
        "requests": most,
        "from_requests": fewest,
        **with_interval("slope_us", ends.difference_s("most", "fewest"), per_request),
    }
