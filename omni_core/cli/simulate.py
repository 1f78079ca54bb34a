# SPDX-License-Identifier: Apache-2.0
"""`omni-core simulate`: small scenarios on the CPU simulator, drawn in text: blocks, hits, and the joined rows."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any

from omni_core.cli.tables import JSON, add_format_argument, print_json, render_table
from omni_core.prefix_cache.config import HIDDEN_KEY
from omni_core.testing.stories import (
    SCENARIOS,
    RowSource,
    Scenario,
    Story,
    StoryBlock,
    StoryDelivery,
    StoryRow,
    StoryStep,
    record_story,
)

ALL = "all"
WIDTH = 100
"""Columns of the drawing."""
_INTRODUCTION = (
    "A model's forward gives one row of output per token it computes. With prefix caching on, the engine",
    "skips tokens it has computed before, so their rows never come out. The cache keeps the rows of",
    "every KV block and joins them with the forward's: each request gets the rows of its whole prompt.",
    "",
    "Below, the real cache runs under a simulated engine. Every row a request gets is compared, bit for",
    "bit, with the row a forward of this run computed for the same tokens.",
)
_MAX_ROWS = 16
"""Rows of a request drawn one by one; of more, the ends and the seam are drawn."""
_SHOWN_VALUES = 3
_MAX_DRAWN_SLOTS = 8


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to argparse's subparsers."""
    parser = subparsers.add_parser(
        "simulate",
        help="run the cache on a simulated engine, with no vLLM, and draw it",
        description="Run the real cache under a simulated engine and draw, step by step, which tokens lie in which KV "
        "block, which rows the forward computed, which came from the cache, and the joined rows of each request. "
        "Every row is checked; exit status 1 if one is wrong.",
    )
    parser.add_argument(
        "--scenario",
        choices=(ALL, *(scenario.name for scenario in SCENARIOS)),
        default=ALL,
        help="; ".join(f"{scenario.name}: {scenario.title}" for scenario in SCENARIOS) + "; all of them (the default)",
    )
    add_format_argument(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run and draw the asked scenarios; 0 if every row was right, else 1."""
    stories = [record_story(scenario) for scenario in SCENARIOS if args.scenario in (ALL, scenario.name)]
    ok = all(story.failure is None for story in stories)
    if args.format == JSON:
        print_json({"ok": ok, "scenarios": [_story_as_json(story) for story in stories]})
    else:
        print("\n".join(_INTRODUCTION))
        for story in stories:
            print()
            print("\n".join(_draw_story(story)))
    return 0 if ok else 1


def _draw_story(story: Story) -> Iterable[str]:
    scenario = story.scenario
    yield "=" * WIDTH
    yield f"Scenario {scenario.name}: {scenario.title}"
    yield "=" * WIDTH
    yield from scenario.about
    yield f"KV cache: {scenario.num_blocks} blocks of {scenario.block_size} tokens; block 0 is the engine's null block."
    for step in story.steps:
        yield ""
        yield from _draw_step(scenario, step)
    yield ""
    if story.failure is None:
        yield (
            f"Checked: {story.rows_checked} rows delivered, each equal bit for bit to the row a forward of this run "
            "computed."
        )
    else:
        yield f"WRONG: {story.failure}"


def _draw_step(scenario: Scenario, step: StoryStep) -> Iterable[str]:
    arrivals = ", ".join(delivery.req_id for delivery in step.deliveries)
    yield f"--- Step {step.number + 1}: {arrivals} ".ljust(WIDTH, "-")
    for delivery in step.deliveries:
        yield (
            f"{delivery.req_id}: {delivery.prompt_tokens} tokens = {delivery.hit_tokens} skipped by the engine "
            f"+ {delivery.computed_rows} computed by the forward"
        )
    yield ""
    yield from _draw_blocks(scenario, step.blocks)
    for delivery in step.deliveries:
        yield ""
        yield from _draw_delivery(delivery)


def _draw_blocks(scenario: Scenario, blocks: Sequence[StoryBlock]) -> Iterable[str]:
    slot_names = [f"slot {i}" for i in range(scenario.block_size)]
    if scenario.block_size > _MAX_DRAWN_SLOTS:
        slot_names = ["tokens"]
    used = [block for block in blocks if any(block.words) or block.block_id == 0]
    rows = [[str(block.block_id), *_slot_cells(block), _note(block)] for block in used]
    empty = [block.block_id for block in blocks if block not in used]
    yield render_table(["block", *slot_names, "in this step"], rows, right_aligned=("block",), width=WIDTH)
    if empty:
        yield f"{f'{empty[0]}-{empty[-1]}':>5}  empty"


def _slot_cells(block: StoryBlock) -> list[str]:
    if len(block.words) <= _MAX_DRAWN_SLOTS:
        return ["-" if word == "" else word for word in block.words]
    words = [word for word in block.words if word]
    empty = len(block.words) - len(words)
    if not words:
        return ["-"]
    return [f"{words[0]} ... {words[-1]}" + (f" ({empty} slots empty)" if empty else "")]


def _note(block: StoryBlock) -> str:
    if block.block_id == 0:
        return "never used"
    parts = []
    if block.written_by:
        parts.append(f"{_and(block.written_by)} computed and stored")
    if block.hit_by:
        parts.append(f"HIT by {_and(block.hit_by)}: rows read from here")
    if any(block.words) and not block.can_be_hit:
        parts.append("not full, so never found")
    return "; ".join(parts)


def _draw_delivery(delivery: StoryDelivery) -> Iterable[str]:
    from_cache = len(delivery.rows) - delivery.computed_rows
    yield (
        f"{delivery.req_id} gets {len(delivery.rows)} rows: {from_cache} from the cache "
        f"+ {delivery.computed_rows} from the forward"
    )
    keys = list(delivery.rows[0].values)
    labels = [f"{_key_label(key)} ({len(delivery.rows[0].values[key])} wide)" for key in keys]
    cells = []
    for row in delivery.rows if len(delivery.rows) <= _MAX_ROWS else _ends_and_seam(delivery):
        if row is None:
            cells.append(["...", "", "", *([""] * len(keys))])
        else:
            cells.append([str(row.position), row.word, _source(row), *(_values(row, key) for key in keys)])
    yield render_table(["position", "token", "row from", *labels], cells, right_aligned=("position",), width=WIDTH)


def _ends_and_seam(delivery: StoryDelivery) -> list[StoryRow | None]:
    """The first and last two rows, and two on each side of the place where cached rows meet computed ones."""
    last, seam = len(delivery.rows) - 1, delivery.hit_tokens
    wanted = sorted({i for i in (0, 1, seam - 2, seam - 1, seam, seam + 1, last - 1, last) if 0 <= i <= last})
    shown: list[StoryRow | None] = []
    for index, position in enumerate(wanted):
        if index and position != wanted[index - 1] + 1:
            shown.append(None)
        shown.append(delivery.rows[position])
    return shown


def _source(row: StoryRow) -> str:
    if row.source is RowSource.FORWARD:
        return "forward"
    where = f"cache, block {row.block_id}"
    return f"{where} (this step)" if row.source is RowSource.SAME_STEP else where


def _values(row: StoryRow, key: str) -> str:
    values = row.values[key]
    shown = " ".join(f"{value:+.3f}" for value in values[:_SHOWN_VALUES])
    return shown if len(values) <= _SHOWN_VALUES else f"{shown} ..."


def _key_label(key: str) -> str:
    return "hidden row" if key == HIDDEN_KEY else key


def _and(names: Sequence[str]) -> str:
    return " and ".join(names)


def _story_as_json(story: Story) -> dict[str, Any]:
    scenario = story.scenario
    return {
        "name": scenario.name,
        "title": scenario.title,
        "num_blocks": scenario.num_blocks,
        "block_size": scenario.block_size,
        "rows_checked": story.rows_checked,
        "failure": story.failure,
        "steps": [_step_as_json(step) for step in story.steps],
    }


def _step_as_json(step: StoryStep) -> dict[str, Any]:
    return {
        "step": step.number + 1,
        "blocks": [
            {
                "block": block.block_id,
                "tokens": [word or None for word in block.words],
                "can_be_hit": block.can_be_hit,
                "written_by": list(block.written_by),
                "hit_by": list(block.hit_by),
            }
            for block in step.blocks
        ],
        "deliveries": [_delivery_as_json(delivery) for delivery in step.deliveries],
    }


def _delivery_as_json(delivery: StoryDelivery) -> dict[str, Any]:
    return {
        "request": delivery.req_id,
        "prompt_tokens": delivery.prompt_tokens,
        "hit_tokens": delivery.hit_tokens,
        "rows_without_cache": delivery.computed_rows,
        "rows_delivered": len(delivery.rows),
        "rows": [
            {
                "position": row.position,
                "token": row.word,
                "from": row.source.value,
                "block": row.block_id,
                "values": {key: list(values) for key, values in row.values.items()},
            }
            for row in delivery.rows
        ],
    }
