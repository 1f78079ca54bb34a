# SPDX-License-Identifier: Apache-2.0
"""What the cache costs an engine step and its consumer, as multiples of the copies that no cache can avoid.

Run `python benchmarks/engine_step.py --help`; README.md beside this file says what each figure means.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from functools import partial
from typing import Any

import numpy as np
import torch
from cached_stage import BLOCK_SIZE, CODES_ROW_BYTES, ROW_BYTES, CachedStage, DecodeBatch, HitPrompts
from paired_samples import LEVEL_PERCENT, PairedSamples

import omni_core

STAGING_DEPTH = 8
CHUNK_TOKENS = 2048
WARM_UP_BURSTS = 4
SEED = 0


class Copies:
    """The floors: bytes moved between buffers that stay warm."""

    def __init__(self, num_bytes: int) -> None:
        self._source, self._clone, self._page = (torch.ones(num_bytes, dtype=torch.uint8) for _ in range(3))

    def clone_and_stage(self) -> None:
        """One clone, then one copy of the clone into a page: what a step's bytes cannot avoid."""
        self._clone.copy_(self._source)
        self._page.copy_(self._clone)

    def copy(self) -> None:
        """One copy: delivered rows cannot stay where a later step writes."""
        self._page.copy_(self._source)


def measure_decode(num_requests: int, num_steps: int) -> list[PairedSamples]:
    """Decode steps of `num_requests`: with resting helper threads, and back to back."""
    num_blocks = DecodeBatch.num_blocks(num_requests)
    stage = CachedStage(num_blocks, num_requests, staging_depth=STAGING_DEPTH, with_codes=True)
    batch = DecodeBatch(stage, num_requests)
    num_bytes = num_requests * (ROW_BYTES + CODES_ROW_BYTES)
    copies = Copies(num_bytes)
    resting = PairedSamples("engine step", "clone + staging copy", num_requests, num_bytes)
    busy = PairedSamples("engine step, back to back", "clone + staging copy", num_requests, num_bytes)
    taking = PairedSamples("materialize", "copy", num_requests, num_bytes)
    try:
        for _ in range(WARM_UP_BURSTS):
            run_burst(stage, batch, copies, PairedSamples("warm-up", "", num_requests, num_bytes))
        for _ in range(num_steps):
            batch.make_room(1)
            batch.prepare_step()
            step_id = resting.take(stage.run_step, copies.clone_and_stage, stage.cache.flush)
            taking.take(partial(stage.deliver, step_id), copies.copy, do_nothing).release()
        for _ in range(-(-num_steps // STAGING_DEPTH)):
            run_burst(stage, batch, copies, busy)
    finally:
        stage.close()
    return [resting, busy, taking]


def run_burst(stage: CachedStage, batch: DecodeBatch, copies: Copies, samples: PairedSamples) -> None:
    """As many steps as there are staging pages, without a pause; then as many floors, with resting helper threads."""
    batch.make_room(STAGING_DEPTH)
    saved = []
    for _ in range(STAGING_DEPTH):
        batch.prepare_step()
        saved.append(samples.time_call(stage.run_step))
    stage.cache.flush()
    for step_id in saved:
        stage.deliver(step_id).release()
        samples.time_floor(copies.clone_and_stage)


def measure_hit_read(hit_tokens: int, num_rounds: int) -> PairedSamples:
    """From the announcement of a step with a hit until its joined rows are there; no forward runs meanwhile."""
    num_blocks = HitPrompts.num_blocks(hit_tokens)
    stage = CachedStage(num_blocks, CHUNK_TOKENS, staging_depth=STAGING_DEPTH, with_codes=False)
    prompts = HitPrompts(stage, hit_tokens, CHUNK_TOKENS)
    num_bytes = hit_tokens * ROW_BYTES
    copies = Copies(num_bytes)

    def read(samples: PairedSamples) -> None:
        prompts.prepare_step()
        samples.take(lambda: stage.deliver(stage.run_step()), copies.copy, stage.cache.flush).release()

    reading = PairedSamples("hit read", "copy", 1, num_bytes)
    try:
        for _ in range(WARM_UP_BURSTS):
            read(PairedSamples("warm-up", "", 1, num_bytes))
        for _ in range(num_rounds):
            read(reading)
    finally:
        stage.close()
    return reading


def do_nothing() -> None:
    """Nothing is left to other threads."""


def report(measured: list[PairedSamples]) -> dict[str, Any]:
    """Everything that was measured, and on what."""
    return {
        "omni_core": omni_core.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "load_average": list(os.getloadavg()),
        "interval_percent": LEVEL_PERCENT,
        "results": [samples.result(SEED) for samples in measured],
    }


def as_text(shown: dict[str, Any]) -> str:
    """The report as one table."""
    about = ", ".join(f"{name} {value}" for name, value in shown.items() if name != "results")
    head = f"{'what':<26} {'requests':>8} {'rounds':>7} {'median':>11}   {'floor':<21} {'median':>11} {'ratio':>7}"
    lines = [as_line(result) for result in shown["results"]]
    return "\n".join([about, "", f"{head}   {LEVEL_PERCENT} % interval", *lines])


def as_line(result: dict[str, Any]) -> str:
    """One line of the table."""
    return (
        f"{result['name']:<26} {result['requests']:>8} {result['rounds']:>7} {result['median_us']:>8.1f} µs   "
        f"{result['floor']:<21} {result['floor_median_us']:>8.1f} µs {result['ratio']:>7.2f}   "
        f"{result['ratio_low']:.2f} to {result['ratio_high']:.2f}"
    )


def positive(text: str) -> int:
    """An argument that must be at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return number


def whole_blocks(text: str) -> int:
    """An argument that must be a multiple of the block size."""
    number = positive(text)
    if number % BLOCK_SIZE:
        raise argparse.ArgumentTypeError(f"{text} must be a multiple of the block size, {BLOCK_SIZE}")
    return number


def batch_sizes(text: str) -> list[int]:
    """Numbers with commas between them."""
    return [positive(part) for part in text.split(",")]


def main(arguments: list[str]) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--requests",
        type=batch_sizes,
        default="1,8,64,256,1024",
        metavar="N,N,...",
        help="batch sizes (default: %(default)s)",
    )
    parser.add_argument(
        "--steps", type=positive, default=2000, metavar="N", help="decode steps per batch size (default: %(default)s)"
    )
    parser.add_argument(
        "--hit-tokens", type=whole_blocks, default=8192, metavar="N", help="length of the hit (default: %(default)s)"
    )
    parser.add_argument(
        "--hit-reads", type=positive, default=200, metavar="N", help="how often it is read (default: %(default)s)"
    )
    parser.add_argument("--format", choices=("text", "json"), default="text")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    measured: list[PairedSamples] = []
    for num_requests in options.requests:
        measured.extend(measure_decode(num_requests, options.steps))
    measured.append(measure_hit_read(options.hit_tokens, options.hit_reads))
    shown = report(measured)
    print(json.dumps(shown, indent=2) if options.format == "json" else as_text(shown))


if __name__ == "__main__":
    main(sys.argv[1:])
