# SPDX-License-Identifier: Apache-2.0
"""`first-save`: what the first save of a new key costs, against a later save of the same step."""

from __future__ import annotations

import statistics

from omni_core.cli.bench.engine_batch import CODES_KEY, CODES_WIDTH, DecodeBatch, StageShape
from omni_core.cli.bench.plan import Plan, say
from omni_core.cli.bench.results import MS_PER_S, Measured, Relation, Row, Target, with_interval
from omni_core.cli.bench.samples import Samples, timed
from omni_core.cli.bench.stage import OURS, OurStage, Stage
from omni_core.cli.bench.threads import MeteredRuntime

NUM_REQUESTS = 64
NUM_BLOCKS, QUICK_NUM_BLOCKS = 65_536, 512
KNOWN_KEY = "known"
STEPS_BEFORE, STEPS_AFTER = 8, 8
ROUNDS, PEER_ROUNDS, QUICK_ROUNDS = 100, 10, 2
_FIRST, _LATER = " first", " later"

TARGETS = (Target("the first save over a later one", "ratio", Relation.AT_MOST, 2.0, {"side": OURS}),)

NOTES = (
    f"a stage of {NUM_BLOCKS:,} blocks that has saved some steps, with hidden rows of 64 bfloat16 and one key, is "
    "given a further key of 16 int64; later: the median of the steps after it, of the same bytes. save_outputs alone",
    "ratio: the first save over a later one of the same stage",
)


def measure(plan: Plan) -> Measured:
    """One fresh stage per round."""
    say("first-save")
    num_blocks = plan.rounds(NUM_BLOCKS, QUICK_NUM_BLOCKS)
    shape = StageShape(
        num_blocks, NUM_REQUESTS, hidden_size=64, token_keys={KNOWN_KEY: CODES_WIDTH, CODES_KEY: CODES_WIDTH}
    )
    samples = Samples()
    peer_rounds = plan.rounds(PEER_ROUNDS, 1)
    for number in range(plan.rounds(ROUNDS, QUICK_ROUNDS)):
        with plan.sides(shape, MeteredRuntime()) as sides:
            for side in sides:
                if isinstance(side, OurStage) or number < peer_rounds:
                    _measure_stage(side, shape, samples, number)
    rows = [_row(samples, name, num_blocks) for name in (OURS, *plan.peer_names)]
    return Measured(tuple(rows), (*plan.notes_beside_peer, *NOTES))


def _measure_stage(side: Stage, shape: StageShape, samples: Samples, number: int) -> None:
    batch = DecodeBatch(shape, NUM_REQUESTS)
    side.prepare(batch.restart(keys=(KNOWN_KEY,)))
    side.deliver(side.run_step()).release()
    for _ in range(STEPS_BEFORE):
        _save(side, batch, (KNOWN_KEY,))
    samples.add(side.name + _FIRST, number, _save(side, batch, None))
    later = [_save(side, batch, None) for _ in range(STEPS_AFTER)]
    samples.add(side.name + _LATER, number, statistics.median(later))


def _save(side: Stage, batch: DecodeBatch, keys: tuple[str, ...] | None) -> float:
    """Seconds of `save_outputs`, nothing else under way."""
    side.prepare(batch.next_step(keys))
    side.start_step()
    step_id, seconds = timed(side.save_step)
    side.settle()
    side.deliver(step_id).release()
    return seconds


def _row(samples: Samples, name: str, num_blocks: int) -> Row:
    first, later = name + _FIRST, name + _LATER
    return {
        "side": name,
        "num_blocks": num_blocks,
        "requests": NUM_REQUESTS,
        "rounds": samples.count(first),
        **with_interval("first_ms", samples.median_s(first), MS_PER_S),
        **with_interval("later_ms", samples.median_s(later), MS_PER_S),
        **with_interval("ratio", samples.ratio(first, later)),
    }
