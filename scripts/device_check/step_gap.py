# SPDX-License-Identifier: Apache-2.0
"""What the cache adds to a step: wall time of a step with and without it, beside the forward alone.

A step ends, as an engine's does that reads its sampled tokens, when the producer's stream is done. The gap is what a
step takes beyond its forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

from device_check.backends import CheckedBackend
from device_check.replay import CachedSteps, Undisturbed
from device_check.step_graphs import StepGraphs, make_graphs, producer_stream
from device_check.traffic import Traffic
from omni_core.runtime import Runtime, ThreadingRuntime

_ROUNDS = 3
_WARM_STEPS = 20


def measure_step_gap(
    checked: CheckedBackend, device: torch.device, traffic: Traffic, busy_rounds: Sequence[int]
) -> dict[str, Any]:
    """One line per length of forward (`busy_rounds`: matrix products in it); medians over steps and rounds, in ms."""
    lines = []
    for busy in busy_rounds:
        alone, without, with_cache = [], [], []
        for _ in range(_ROUNDS):  # in turns: what the machine does meanwhile falls on all three
            runtime = ThreadingRuntime()
            with producer_stream(device):
                graphs = make_graphs(checked, device, traffic, busy)
                graphs.prepare(traffic.steps)
                alone.append(_forward_s(graphs, traffic, runtime))
                without.append(_step_without_s(graphs, traffic, runtime))
                with_cache.append(_step_with_s(checked, device, graphs, traffic, runtime))
        forward_s, without_s, with_s = median(alone), median(without), median(with_cache)
        lines.append(
            {
                "busy_rounds": busy,
                "forward_ms": _ms(forward_s),
                "step_without_cache_ms": _ms(without_s),
                "step_with_cache_ms": _ms(with_s),
                "gap_without_cache_ms": _ms(without_s - forward_s),
                "gap_with_cache_ms": _ms(with_s - forward_s),
                "cache_adds_ms": _ms(with_s - without_s),
            }
        )
    return {"ok": True, "steps": len(traffic.steps), "tokens_per_step": _tokens_per_step(traffic), "forwards": lines}


def _forward_s(graphs: StepGraphs, traffic: Traffic, runtime: Runtime) -> float:
    """A forward's share of all of them queued one behind the other."""
    graphs.run(0)
    graphs.wait()
    started_s = runtime.monotonic_s()
    for number in range(len(traffic.steps)):
        graphs.run(number)
    graphs.wait()
    return (runtime.monotonic_s() - started_s) / len(traffic.steps)


def _step_without_s(graphs: StepGraphs, traffic: Traffic, runtime: Runtime) -> float:
    seconds = []
    for number in range(len(traffic.steps)):
        started_s = runtime.monotonic_s()
        graphs.run(number)
        graphs.wait()
        seconds.append(runtime.monotonic_s() - started_s)
    return median(seconds[_WARM_STEPS:] or seconds)


def _step_with_s(
    checked: CheckedBackend, device: torch.device, graphs: StepGraphs, traffic: Traffic, runtime: Runtime
) -> float:
    backend = checked.make(runtime)
    try:
        backend.bind_thread()
        seconds = []
        with CachedSteps(traffic, backend, runtime, device, graphs, Undisturbed()) as steps:
            for number in range(len(traffic.steps)):
                started_s = runtime.monotonic_s()
                steps.run(number)
                graphs.wait()
                seconds.append(runtime.monotonic_s() - started_s)
            steps.finish()
        return median(seconds[_WARM_STEPS:] or seconds)
    finally:
        backend.close()


def _tokens_per_step(traffic: Traffic) -> float:
    return round(sum(step.num_tokens for step in traffic.steps) / len(traffic.steps), 1)


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 4)
