# SPDX-License-Identifier: Apache-2.0
"""The steps of an engine, decided beforehand, so that the check itself can run them as fast as the device goes.

The simulated scheduler decides: prompts that share prefixes, chunks, decodes, preemptions, blocks that change hands.
The rows are the fake model's: a pure function of token prefix, position and key, so what must be delivered is known.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from omni_core.prefix_cache.config import HIDDEN_KEY
from omni_core.prefix_cache.events import StepEvents, StepLayout
from omni_core.testing.engine_schedule import ScheduledRun
from omni_core.testing.fake_model import FakeKey, FakeModel, FakeRun, hidden_key
from omni_core.testing.sampling import sample
from omni_core.testing.scheduler_config import Preemption, SchedulerConfig
from omni_core.testing.sim_request import SimRequest
from omni_core.testing.sim_scheduler import SimScheduler

CODES_KEY = "codes"
_CODES_PER_ROW = 4
_SHARED_PREFIXES = 8


@dataclass(frozen=True, slots=True)
class TrafficConfig:
    """What the steps are like."""

    num_steps: int
    hidden_size: int = 512
    hidden_dtype: torch.dtype = torch.bfloat16
    num_requests: int = 32
    """Requests that run at one time."""
    block_size: int = 16
    max_num_tokens: int = 512
    capture_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 24, 32, 48, 64, 128, 256)
    """Larger steps run without a graph."""
    prompt_tokens: tuple[int, int] = (8, 300)
    """Fewest and most of a prompt."""
    output_tokens: tuple[int, int] = (1, 60)
    seed: int = 0

    @property
    def num_blocks(self) -> int:
        """A KV cache so small that blocks are recycled all the time, and requests preempted now and then."""
        longest = self.prompt_tokens[1] + self.output_tokens[1]
        return 2 + max(-(-longest // self.block_size) * 2, self.num_requests * (longest // 2) // self.block_size)

    def model(self) -> FakeModel:
        """The model of the rows: hidden rows and a second key."""
        codes = FakeKey(CODES_KEY, (_CODES_PER_ROW,), torch.int64)
        return FakeModel(hidden_key(self.hidden_size, self.hidden_dtype), (codes,))


@dataclass(frozen=True, slots=True)
class TrafficStep:
    """One step, ready to run."""

    events: StepEvents
    layout: StepLayout
    runs: tuple[ScheduledRun, ...]
    rows: Mapping[str, torch.Tensor]
    """What its forward must give: `(num_tokens, ...)` on the host, by key."""

    @property
    def num_tokens(self) -> int:
        """Real rows."""
        return len(self.layout.positions)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Steps in order."""

    config: TrafficConfig
    model: FakeModel
    steps: tuple[TrafficStep, ...]
    finished: Mapping[str, int]
    """Requests that finished, and how many rows each has."""


def record_traffic(config: TrafficConfig) -> Traffic:
    """Decide `config.num_steps` steps and compute their rows on the host."""
    model, rng = config.model(), random.Random(f"traffic {config.seed}")
    scheduler = SimScheduler(
        SchedulerConfig(
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            max_num_tokens=config.max_num_tokens,
            max_num_requests=config.num_requests,
            preemption=Preemption.RECOMPUTE_V1,
        )
    )
    prefixes = [[rng.randrange(10, 50_000) for _ in range(config.prompt_tokens[1])] for _ in range(_SHARED_PREFIXES)]
    steps: list[TrafficStep] = []
    finished: dict[str, int] = {}
    requests: dict[str, SimRequest] = {}
    while len(steps) < config.num_steps:
        while len(scheduler.running) + len(scheduler.waiting) < config.num_requests:
            request = _request(f"r{len(requests)}", config, prefixes, rng)
            requests[request.req_id] = request
            scheduler.add(request)
        schedule = scheduler.schedule()
        if schedule.runs:
            steps.append(_step(config, model, schedule.events, schedule.runs))
        for req_id in scheduler.complete(schedule, sample(model, schedule.runs)):
            finished[req_id] = requests[req_id].max_rows
    return Traffic(config, model, tuple(steps), finished)


def _request(req_id: str, config: TrafficConfig, prefixes: list[list[int]], rng: random.Random) -> SimRequest:
    length = rng.randint(*config.prompt_tokens)
    shared = rng.randint(0, length)
    prompt = rng.choice(prefixes)[:shared] + [rng.randrange(10, 50_000) for _ in range(length - shared)]
    return SimRequest(req_id, tuple(prompt), max_output_tokens=rng.randint(*config.output_tokens))


def _step(config: TrafficConfig, model: FakeModel, events: StepEvents, runs: tuple[ScheduledRun, ...]) -> TrafficStep:
    positions = [np.arange(run.start, run.stop, dtype=np.int64) for run in runs]
    slots = [
        np.asarray(run.block_ids, np.int64)[where // config.block_size] * config.block_size + where % config.block_size
        for run, where in zip(runs, positions, strict=True)
    ]
    starts = np.concatenate([[0], np.cumsum([run.num_tokens for run in runs])]).astype(np.int64)
    layout = StepLayout(tuple(run.req_id for run in runs), starts, np.concatenate(positions), np.concatenate(slots))
    outputs = model.forward([FakeRun(run.track, run.start, run.stop) for run in runs], {CODES_KEY}, int(starts[-1]))
    return TrafficStep(events, layout, runs, {HIDDEN_KEY: outputs.hidden, **outputs.token_outputs})
