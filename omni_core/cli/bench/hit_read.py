# SPDX-License-Identifier: Apache-2.0
"""`hit-read`: from the announcement of a step with a prefix hit until its joined rows are there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from omni_core.cli.bench.driver import FLOOR, comparison
from omni_core.cli.bench.engine_batch import HitPrompts, StageShape
from omni_core.cli.bench.floors import Copies
from omni_core.cli.bench.plan import Plan, say
from omni_core.cli.bench.plots import Chart
from omni_core.cli.bench.results import Measured, Relation, Row, Target
from omni_core.cli.bench.samples import Samples
from omni_core.cli.bench.stage import OURS, Delivered, Stage
from omni_core.cli.bench.threads import MeteredRuntime

HIT_TOKENS, QUICK_HIT_TOKENS = (1024, 8192, 32_768), (64,)
CHUNK_TOKENS, QUICK_CHUNK_TOKENS = 2048, 32
MOST_HELD_BYTES = 4 << 30
NUM_HELD = 64
ROUNDS = {1024: 200, 8192: 100, 32_768: 30}
COLD_ROUNDS = 5
WARM_UP_READS = 3

COLD, RELEASED, DROPPED, HELD = "cold", "warm, release()", "warm, no release()", "outputs held"

TARGETS = (
    Target(
        "8,192 tokens, warm, with release(), over memcpy",
        "ratio",
        Relation.AT_MOST,
        1.5,
        {"what": RELEASED, "tokens": 8192},
    ),
)

CHARTS = (Chart("hit-read", "ours over memcpy (CPU)", "tokens", {"ratio": ""}, "times memcpy", group="what"),)

NOTES = (
    "one request hits all of a prompt stored in scattered blocks and computes one token; no forward runs in between "
    "that would hide the reading",
    "cold: the first read of a stage; release(): buffers are recycled; without it each read gets fresh memory, whose "
    "pages the operating system has to supply; held: the outputs of so many reads before (held) are still there",
    "floor: one copy of the hit's bytes between warm buffers",
)


@dataclass(frozen=True, slots=True)
class _Consumer:
    """What becomes of the delivered rows."""

    what: str
    take: Callable[[Delivered], None]
    num_held: int = 0


def measure(plan: Plan) -> Measured:
    """Every length."""
    rows: list[Row] = []
    for hit_tokens in QUICK_HIT_TOKENS if plan.quick else HIT_TOKENS:
        say(f"hit-read: {hit_tokens} tokens")
        rows.extend(_measure_length(plan, hit_tokens))
    return Measured(tuple(rows), (*plan.notes_beside_peer, *NOTES))


def _measure_length(plan: Plan, hit_tokens: int) -> list[Row]:
    chunk = plan.rounds(CHUNK_TOKENS, QUICK_CHUNK_TOKENS)
    shape = StageShape(HitPrompts.num_blocks(hit_tokens), chunk, token_keys={})
    num_bytes = hit_tokens * shape.row_bytes
    copies = Copies(num_bytes)
    rounds = plan.rounds(ROUNDS.get(hit_tokens, 0), 2)
    peer_rounds = rounds // 4 + 1
    rows = [_row(plan, COLD, hit_tokens, _cold_reads(plan, shape, hit_tokens, copies), 0)]
    num_held = plan.rounds(max(1, min(NUM_HELD, MOST_HELD_BYTES // num_bytes)), 2)
    held: deque[Delivered] = deque(maxlen=num_held)
    consumers = (
        _Consumer(RELEASED, lambda rows: rows.release()),
        _Consumer(DROPPED, lambda rows: None),
        _Consumer(HELD, held.append, num_held),
    )
    with plan.sides(shape, MeteredRuntime()) as sides:
        prompts = [_stored(side, shape, hit_tokens) for side in sides]
        for consumer in consumers:
            samples = Samples()
            for number in range(-max(WARM_UP_READS, consumer.num_held), rounds):
                for side, prompt in zip(sides, prompts, strict=True):
                    # The peer recycles nothing, so it has one way to be read, and needs one read to be warm.
                    if side.name == OURS:
                        consumer.take(_read(side, prompt, samples, number))
                    elif number >= -1 and number < peer_rounds:
                        _read(side, prompt, samples, number).release()
                samples.time(FLOOR, number, copies.copy)
            held.clear()
            rows.append(_row(plan, consumer.what, hit_tokens, samples.from_round(0), consumer.num_held))
    return rows


def _cold_reads(plan: Plan, shape: StageShape, hit_tokens: int, copies: Copies) -> Samples:
    samples = Samples()
    for number in range(plan.rounds(COLD_ROUNDS, 2)):
        with plan.sides(shape, MeteredRuntime()) as sides:
            for side in sides:
                _read(side, _stored(side, shape, hit_tokens), samples, number)
        samples.time(FLOOR, number, copies.copy)
    return samples


def _stored(side: Stage, shape: StageShape, hit_tokens: int) -> HitPrompts:
    prompts = HitPrompts(shape, hit_tokens)
    for step in prompts.storing_steps():
        side.prepare(step)
        side.deliver(side.run_step()).release()
    side.settle()
    return prompts


def _read(side: Stage, prompts: HitPrompts, samples: Samples, number: int) -> Delivered:
    side.prepare(prompts.reading_step())
    rows = samples.time(side.name, number, lambda: side.deliver(side.run_step()))
    side.settle()
    return rows


def _row(plan: Plan, what: str, hit_tokens: int, samples: Samples, num_held: int) -> Row:
    row: Row = {"what": what, "tokens": hit_tokens, "held": num_held, "rounds": samples.count(OURS)}
    return row | comparison(samples, plan.peer_names)
