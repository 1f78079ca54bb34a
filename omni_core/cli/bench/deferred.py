# SPDX-License-Identifier: Apache-2.0
"""`deferred`: a key whose rows may stay on the device until their request ends, at its cost per step and per end."""

from __future__ import annotations

from dataclasses import replace

from omni_core.cli.bench.driver import FLOOR, comparison
from omni_core.cli.bench.engine_batch import BLOCK_SIZE, CODES_WIDTH, DecodeBatch, EngineStep, StageShape
from omni_core.cli.bench.floors import Copies
from omni_core.cli.bench.plan import Plan, say
from omni_core.cli.bench.plots import Chart
from omni_core.cli.bench.results import MS_PER_S, Measured, Relation, Row, Target, with_interval
from omni_core.cli.bench.samples import Samples, timed
from omni_core.cli.bench.stage import OURS, OurStage, Stage
from omni_core.cli.bench.threads import MeteredRuntime

NO_PRESSURE, UNDER_BUDGET = "no pressure", "budget of 100 steps"
STEP, FINISH = "step", "finish"
NUM_REQUESTS, QUICK_REQUESTS = 256, 4
NUM_STEPS, QUICK_STEPS = 1_000, 6
BUDGET_STEPS, QUICK_BUDGET_STEPS = 100, 2
NUM_FINISHES, QUICK_FINISHES = 64, 2
TURN_STEPS = 20
"""Steps of one side before the next has its turn."""
WARM_UP_STEPS = 2
REST_S = 0.03
"""Between a finish and the next step, so that what the finish left to other threads is not in the step's figure. A call
that waits for it would also land what must stay on the device."""
_FINISHING, _PLAIN = " finishing", " plain"

TARGETS = (
    *(
        Target(
            f"a step, {budget}",
            "ours_ms",
            Relation.AT_MOST,
            0.2,
            {"what": STEP, "budget": budget, "requests": NUM_REQUESTS},
        )
        for budget in (NO_PRESSURE, UNDER_BUDGET)
    ),
    *(
        Target(
            f"a finish over the finish of {peer}, {NO_PRESSURE}",
            f"over_{peer}",
            Relation.AT_MOST,
            1 / 20,
            {"what": FINISH, "budget": NO_PRESSURE, "requests": NUM_REQUESTS},
        )
        for peer in ("peer_eager", "peer_async")
    ),
)

CHARTS = (
    Chart(
        "deferred",
        "a step with a deferred key, 256 requests (CPU)",
        "budget",
        {"ours_ms": "ours", "peer_eager_ms": "peer, eager", "peer_async_ms": "peer, asynchronous", "floor_ms": "floor"},
        "ms",
        {"what": STEP},
    ),
)

NOTES = (
    "a stage with one deferred key of 16 int64 and no hidden rows, so that nothing else is in the figures; every step "
    "is discarded, because rows that are delivered cannot stay on the device",
    "finish: the two engine-thread calls of a step in which one request ends, less the same calls of a later step; "
    f"other threads rest before both. With the {UNDER_BUDGET} the peer has put most rows away in its steps, and "
    "its finish is lost in their noise, so that no target is held there",
    "floor: one clone of the step's bytes",
    "device_bytes: what is held on the device at the end of the steps; of it deferred_bytes in rows that wait",
)


def measure(plan: Plan) -> Measured:
    """Both budgets."""
    rows: list[Row] = []
    num_requests = plan.rounds(NUM_REQUESTS, QUICK_REQUESTS)
    num_steps = plan.rounds(NUM_STEPS, QUICK_STEPS)
    blocks = -(-(WARM_UP_STEPS + 1 + num_steps + 2 * plan.rounds(NUM_FINISHES, QUICK_FINISHES)) // BLOCK_SIZE)
    shape = StageShape(
        DecodeBatch.num_blocks(num_requests, blocks),
        num_requests,
        hidden_size=None,
        token_keys={},
        deferred_keys={"codes": CODES_WIDTH},
    )
    step_bytes = num_requests * shape.row_bytes
    for budget, steps in (
        (NO_PRESSURE, 2 * num_steps),
        (UNDER_BUDGET, plan.rounds(BUDGET_STEPS, QUICK_BUDGET_STEPS)),
    ):
        say(f"deferred: {budget}")
        rows.extend(_measure_budget(plan, replace(shape, device_staging_bytes=steps * step_bytes), budget, blocks))
    return Measured(tuple(rows), (*plan.notes_beside_peer, *NOTES))


def _measure_budget(plan: Plan, shape: StageShape, budget: str, blocks: int) -> list[Row]:
    num_requests, num_steps = shape.max_num_tokens, plan.rounds(NUM_STEPS, QUICK_STEPS)
    copies = Copies(num_requests * shape.row_bytes)
    steps, finishes = Samples(), Samples()
    held: Row = {}
    runtime = MeteredRuntime()
    with plan.sides(shape, runtime, deliver_all=False) as sides:
        batches = [DecodeBatch(shape, num_requests, blocks) for _ in sides]
        for side, batch in zip(sides, batches, strict=True):
            _run(side, batch.restart())
            for _ in range(WARM_UP_STEPS):
                _run(side, batch.next_step())
        for first in range(0, num_steps, TURN_STEPS):
            turn = range(first, min(first + TURN_STEPS, num_steps))
            for side, batch in zip(sides, batches, strict=True):
                for number in turn:
                    steps.add(side.name, number, _run(side, batch.next_step()))
            for number in turn:
                steps.time(FLOOR, number, copies.copy)
        for side in sides:
            if isinstance(side, OurStage):
                stats = side.stats()
                held = {"device_bytes": stats.device_bytes, "deferred_bytes": stats.deferred_bytes}
        for number in range(plan.rounds(NUM_FINISHES, QUICK_FINISHES)):
            for side, batch in zip(sides, batches, strict=True):
                runtime.sleep(REST_S)
                finishes.add(side.name + _FINISHING, number, _run(side, batch.finish_last()))
                runtime.sleep(REST_S)
                finishes.add(side.name + _PLAIN, number, _run(side, batch.next_step()))
    common: Row = {"budget": budget, "requests": num_requests}
    step = {"what": STEP, **common, "rounds": steps.count(OURS), **comparison(steps, plan.peer_names), **held}
    return [step, {"what": FINISH, **common, **_finish_fields(finishes, plan.peer_names)}]


def _run(side: Stage, step: EngineStep) -> float:
    """Seconds of a step on the engine thread; its rows are given up, and nothing is under way afterwards."""
    side.prepare(step)
    step_id, seconds = timed(side.run_step)
    side.discard(step_id)
    return seconds


def _finish_fields(samples: Samples, peer_names: tuple[str, ...]) -> Row:
    ours = (OURS + _FINISHING, OURS + _PLAIN)
    row: Row = {"rounds": samples.count(ours[0]), **with_interval("ours_ms", samples.difference_s(*ours), MS_PER_S)}
    for name in peer_names:
        peer = (name + _FINISHING, name + _PLAIN)
        row |= with_interval(f"{name}_ms", samples.difference_s(*peer), MS_PER_S)
        row |= with_interval(f"over_{name}", samples.ratio_of_differences(ours, peer))
    return row
