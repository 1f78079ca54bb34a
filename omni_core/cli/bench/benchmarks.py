# SPDX-License-Identifier: Apache-2.0
"""The table of benchmarks, and how one is run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from omni_core.cli.bench import (
    contention,
    deferred,
    diffusion,
    engine_step,
    first_save,
    hit_read,
    instructions,
    scale,
    serving,
)
from omni_core.cli.bench.machine import machine_facts
from omni_core.cli.bench.plan import Plan
from omni_core.cli.bench.plots import Chart
from omni_core.cli.bench.results import Measured, Target


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One name of `omni-core bench`."""

    name: str
    summary: str
    measure: Callable[[Plan], Measured]
    targets: Sequence[Target]
    charts: Sequence[Chart] = ()


BENCHMARKS = (
    Benchmark(
        "engine-step",
        "a decode step on the engine thread, and its materialize",
        engine_step.measure,
        engine_step.TARGETS,
        engine_step.CHARTS,
    ),
    Benchmark(
        "deferred",
        "a key whose rows stay on the device until their request ends",
        deferred.measure,
        deferred.TARGETS,
        deferred.CHARTS,
    ),
    Benchmark("hit-read", "rows of a prefix hit", hit_read.measure, hit_read.TARGETS, hit_read.CHARTS),
    Benchmark("first-save", "the first save of a new key", first_save.measure, first_save.TARGETS),
    Benchmark("scale", "a step against sizes it should not depend on", scale.measure, scale.TARGETS, scale.CHARTS),
    Benchmark("contention", "a step beside builder threads", contention.measure, contention.TARGETS, contention.CHARTS),
    Benchmark(
        "diffusion",
        "a diffusion stage dense, paged, and paged with prefix caching",
        diffusion.measure,
        diffusion.TARGETS,
        diffusion.CHARTS,
    ),
    Benchmark("instructions", "machine instructions of a step", instructions.measure, instructions.TARGETS),
    Benchmark("vllm", "a real engine with Omni Core and without", serving.measure, serving.TARGETS, serving.CHARTS),
)
BY_NAME = {benchmark.name: benchmark for benchmark in BENCHMARKS}


def run_benchmark(benchmark: Benchmark, plan: Plan) -> dict[str, Any]:
    """Measure, hold against the targets, and make one document of it. A quick run has no verdicts."""
    torch.set_num_threads(1)
    machine = machine_facts()
    measured = benchmark.measure(plan)
    judged = () if plan.quick else measured.rows
    return {
        "benchmark": benchmark.name,
        "machine": machine,
        "notes": list(measured.notes),
        "rows": [{"benchmark": benchmark.name, **row} for row in measured.rows],
        "targets": [target.judge(judged).as_document() for target in benchmark.targets],
    }
