# SPDX-License-Identifier: Apache-2.0
"""`scale`: whether a step's cost grows with what has nothing to do with it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

import numpy as np

from omni_core.cli.bench.engine_batch import (
    BLOCK_SIZE,
    STAGING_DEPTH,
    Batch,
    DecodeBatch,
    EngineStep,
    NewRequest,
    StageShape,
    StepTensors,
)
from omni_core.cli.bench.plan import Plan, say
from omni_core.cli.bench.plots import Chart
from omni_core.cli.bench.results import MS_PER_S, Measured, Relation, Row, Target, with_interval
from omni_core.cli.bench.samples import Samples, timed
from omni_core.cli.bench.stage import OurStage
from omni_core.cli.bench.threads import MeteredRuntime

NUM_REQUESTS = 64
HIDDEN_SIZE = 64
ROUNDS, QUICK_ROUNDS = 2_000, 3
WARM_UP_STEPS = 16
NUM_BLOCKS = (1_000, 10_000, 100_000, 1_000_000)
LIVE_REQUESTS = (0, 100, 1_000, 10_000)
PENDING_READS = (0, 64, 256)
READS_PER_STEP = 16
HIT_BLOCKS = 4
MOST_GROWTH = 1.1

BLOCKS, LIVE, PENDING = "num_blocks", "live requests not in the step", "pending reads"

TARGETS = tuple(
    Target(f"cost against {what}", "ratio", Relation.AT_MOST, MOST_GROWTH, {"what": what})
    for what in (BLOCKS, LIVE, PENDING)
)

CHARTS = tuple(
    Chart(f"scale-{name}", f"a step against {what} (CPU)", "size", {"ours_ms": "ours"}, "ms", {"what": what})
    for name, what in (("blocks", BLOCKS), ("live", LIVE), ("reads", PENDING))
)

NOTES = (
    f"decode steps of {NUM_REQUESTS} requests with hidden rows of {HIDDEN_SIZE} bfloat16 and one key, every other "
    "thread idle; stages of all sizes are alive at once and take turns",
    "ratio: the cost over that of the smallest size",
    f"pending reads: {READS_PER_STEP} requests per step have hit {HIT_BLOCKS} stored blocks each, and nobody has "
    "materialised those steps yet",
)


def measure(plan: Plan) -> Measured:
    """Every dimension."""
    few = 2 if plan.quick else None
    rows: list[Row] = []
    rows.extend(_measure(plan, BLOCKS, NUM_BLOCKS[:few], _with_blocks))
    rows.extend(_measure(plan, LIVE, LIVE_REQUESTS[:few], _with_live_requests))
    rows.extend(_measure(plan, PENDING, PENDING_READS[:few], _with_pending_reads))
    return Measured(tuple(rows), (*plan.notes, *NOTES))


def _shape(num_blocks: int, max_num_tokens: int = NUM_REQUESTS) -> StageShape:
    return StageShape(num_blocks, max_num_tokens, hidden_size=HIDDEN_SIZE)


def _measure(plan: Plan, what: str, sizes: tuple[int, ...], make: Callable[[int], OurStage]) -> list[Row]:
    say(f"scale: {what}")
    samples = Samples()
    with ExitStack() as stack:
        sides: dict[int, tuple[OurStage, DecodeBatch]] = {}
        for size in sizes:
            stage = make(size)
            stack.callback(stage.close)
            sides[size] = stage, DecodeBatch(_shape(0), NUM_REQUESTS)
        for number in range(-WARM_UP_STEPS, plan.rounds(ROUNDS, QUICK_ROUNDS)):
            for size, (stage, batch) in sides.items():
                if not batch.room:
                    _step(stage, batch.restart())
                samples.add(str(size), number, _step(stage, batch.next_step()))
    kept = samples.from_round(0)
    smallest = str(sizes[0])
    return [
        {
            "what": what,
            "size": size,
            "requests": NUM_REQUESTS,
            "rounds": kept.count(str(size)),
            **with_interval("ours_ms", kept.median_s(str(size)), MS_PER_S),
            **({} if size == sizes[0] else with_interval("ratio", kept.ratio(str(size), smallest))),
        }
        for size in sizes
    ]


def _step(stage: OurStage, step: EngineStep) -> float:
    """Seconds of a step on the engine thread; nothing is under way afterwards."""
    stage.prepare(step)
    step_id, seconds = timed(stage.run_step)
    stage.settle()
    stage.deliver(step_id).release()
    return seconds


def _with_blocks(num_blocks: int) -> OurStage:
    return OurStage(_shape(num_blocks), MeteredRuntime())


def _with_live_requests(num_live: int) -> OurStage:
    """A stage in which so many more requests have computed a token and wait for their next turn."""
    first_block = DecodeBatch.num_blocks(NUM_REQUESTS)
    shape = _shape(first_block + num_live, max(NUM_REQUESTS, num_live))
    stage = OurStage(shape, MeteredRuntime())
    if num_live:
        waiting = DecodeBatch(shape, num_live, 1, first_block=first_block, name="waiting")
        _step(stage, waiting.restart())
    return stage


def _with_pending_reads(num_reads: int) -> OurStage:
    """A stage with so many requests whose hits were gathered and not yet taken."""
    first_block = DecodeBatch.num_blocks(NUM_REQUESTS)
    num_steps = num_reads // READS_PER_STEP
    shape = replace(
        _shape(first_block + HIT_BLOCKS + num_reads, HIT_BLOCKS * BLOCK_SIZE),
        staging_depth=STAGING_DEPTH + num_steps,
    )
    stage = OurStage(shape, MeteredRuntime())
    tensors = StepTensors(shape)
    stored = tuple(range(first_block, first_block + HIT_BLOCKS))
    hit_tokens = HIT_BLOCKS * BLOCK_SIZE

    def step(tables: dict[str, tuple[int, ...]], computed: int, scheduled: int) -> EngineStep:
        num = len(tables)
        batch = Batch(
            tuple(tables),
            np.array(list(tables.values()), np.int32),
            np.full(num, computed, np.int32),
            np.full(num, scheduled, np.int64),
        )
        rows = num * scheduled
        started = tuple(NewRequest(name, blocks, computed) for name, blocks in tables.items())
        return EngineStep(batch, tensors.hidden(rows), tensors.outputs(rows), started)

    _step(stage, step({"writer": stored}, 0, hit_tokens))
    tail = first_block + HIT_BLOCKS
    for number in range(num_steps):
        readers = range(number * READS_PER_STEP, (number + 1) * READS_PER_STEP)
        stage.prepare(step({f"reader-{reader}": (*stored, tail + reader) for reader in readers}, hit_tokens, 1))
        stage.run_step()
        stage.settle()
    return stage
