# SPDX-License-Identifier: Apache-2.0
"""What a model's outputs are put through: each scenario is a stage, how requests come, and how steps are built."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from omni_core.prefix_cache.policy import ModelCachePolicy
from omni_core.testing.engine_schedule import SimSchedule
from omni_core.testing.model_check.stage import ModelStage
from omni_core.testing.model_check.stage_config import ModelStageConfig
from omni_core.testing.row_kinds import RowKind
from omni_core.testing.scheduler_config import Mishaps, Preemption, SchedulerConfig
from omni_core.testing.sim_request import SimRequest
from omni_core.testing.sim_step import NO_FAULTS, SavedStep, StepFaults

Tokens = tuple[int, ...]

_SPARE_ROW_BYTES = 1 << 10


@dataclass(frozen=True, slots=True)
class Likelihoods:
    """Chances, between 0 and 1, of what a client or a consumer does."""

    aborted_between: float = 0.0
    """Before a step, some request is aborted."""
    aborted_before_forward: float = 0.0
    """A request of a step is aborted between schedule and forward: its blocks are hashed, its rows never computed."""
    discarded: float = 0.0
    """A step is discarded instead of built."""
    partly_asked: float = 0.0
    """A step is built for some of its requests."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One way of running a stage."""

    name: str
    stage: ModelStageConfig
    kinds: tuple[RowKind, ...]
    """Kinds of rows it is about."""
    copies: int = 1
    """How often each prompt is sent at one time."""
    waves: int = 2
    """How often all prompts are sent; from the second time on also cut, with another ending, and one that is new."""
    max_output_tokens: int = 3
    max_steps_late: int = 0
    """Most steps that pass before a step is built."""
    likelihoods: Likelihoods = field(default_factory=Likelihoods)


def scenarios_for(
    prompts: Sequence[Tokens],
    policy: ModelCachePolicy,
    *,
    block_size: int,
    vocabulary: int,
    row_bytes: int,
    seed: int,
) -> tuple[Scenario, ...]:
    """The scenarios, sized for these prompts and for outputs of `row_bytes` per token, hidden states aside."""
    longest = max(map(len, prompts))
    blocks = -(-(longest + 6) // block_size)
    num_tokens = max(64, 4 * blocks * block_size)
    scheduler = SchedulerConfig(1 + 12 * blocks * len(prompts), block_size, num_tokens, mishaps=Mishaps(seed))
    plain = ModelStageConfig(scheduler, vocabulary=vocabulary, row_bytes=row_bytes + _SPARE_ROW_BYTES)
    chunks = replace(scheduler, max_chunk_tokens=block_size + 1)
    small = replace(scheduler, num_blocks=1 + blocks + 1)
    resumed, live = (
        replace(
            scheduler,
            # Small chunks: a request is taken off while another one goes on with the same prompt.
            max_chunk_tokens=max(1, block_size // 2),
            num_blocks=1 + 3 * blocks,
            preemption=preemption,
            mishaps=Mishaps(seed, preempted=0.4),
        )
        for preemption in (Preemption.RECOMPUTE_V1, Preemption.RECOMPUTE_V2)
    )
    drafts = replace(scheduler, max_draft_tokens=3)
    graphs = tuple(sorted({1, 2, 4, 8, num_tokens // 4, num_tokens // 2, num_tokens}))
    all_scenarios = [
        Scenario("stored hits", plain, (RowKind.STORED_HIT,)),
        Scenario("hits inside one step", plain, (RowKind.SAME_STEP_HIT,), copies=3),
        Scenario("prompts in chunks", replace(plain, scheduler=chunks), (RowKind.PARTIAL_CHUNK,)),
        Scenario("recycled blocks", replace(plain, scheduler=small), (RowKind.STORED_HIT,), waves=4),
        Scenario(
            "preempted, resumed",
            replace(plain, scheduler=resumed),
            (RowKind.RESUMED, RowKind.RECOMPUTED),
            copies=2,
            waves=4,
        ),
        Scenario(
            "preempted, started while live",
            replace(plain, scheduler=live),
            (RowKind.RESUMED, RowKind.RECOMPUTED),
            copies=2,
            waves=4,
        ),
        Scenario(
            "built late, discarded, not asked for",
            replace(plain, scheduler=replace(small, num_blocks=1 + 2 * blocks)),
            (RowKind.LATE_MATERIALISE, RowKind.REDELIVERED),
            copies=2,
            waves=3,
            max_steps_late=3,
            likelihoods=Likelihoods(discarded=0.15, partly_asked=0.15),
        ),
        Scenario("padded graphs, static buffers", replace(plain, capture_sizes=graphs), (RowKind.STORED_HIT,)),
        Scenario(
            "rejected drafts", replace(plain, scheduler=drafts), (RowKind.CLIPPED,), copies=2, max_output_tokens=6
        ),
    ]
    if policy.needs_full_hidden_states:
        # Which rows were never computed is told by the hidden ones: without them, such rows are zeros by design.
        aborted = Likelihoods(aborted_between=0.1, aborted_before_forward=0.25)
        all_scenarios.append(
            Scenario(
                "aborted before and after the forward",
                replace(plain, scheduler=replace(small, num_blocks=1 + 2 * blocks)),
                (RowKind.HASHED_NEVER_COMPUTED,),
                copies=2,
                waves=6,
                likelihoods=aborted,
            )
        )
    if policy.deferred_keys:
        starved = replace(plain, device_staging_bytes=4 * longest * max(64, row_bytes))
        all_scenarios.append(Scenario("deferred rows, little device memory", starved, (RowKind.DEFERRED,), copies=2))
    return tuple(all_scenarios)


class ScenarioRun:
    """Runs one scenario to its end. One thread; blocks until it is done.

    Args:
        scenario: what to run.
        stage: a fresh stage of the scenario's configuration.
        prompts: what clients ask for.
        seed: decides every random choice.
    """

    def __init__(self, scenario: Scenario, stage: ModelStage, prompts: Sequence[Tokens], seed: int) -> None:
        self.num_steps = 0
        self.num_requests = 0
        self._scenario = scenario
        self._stage = stage
        self._prompts = prompts
        self._rng = random.Random(f"{scenario.name} {seed}")
        self._due: dict[int, int] = {}
        self._wave = 0

    def run(self) -> None:
        """Send every wave, and step until all requests have ended.

        Raises:
            OracleViolationError: a delivery was wrong.
            OmniPrefixCacheError: the cache raised where it should not.
            AuthoredModelError: the model raised, or returned what no stage can take.
        """
        for wave in range(self._scenario.waves):
            self._wave = wave
            for prompt in self._next_prompts():
                for _ in range(self._scenario.copies):
                    request = SimRequest(f"r{self.num_requests}", prompt, self._scenario.max_output_tokens)
                    self._stage.submit(request)
                    self.num_requests += 1
            while self._stage.has_news:
                self._step()
        self._stage.finish()

    def _next_prompts(self) -> list[Tokens]:
        if self._wave == 0:
            return list(self._prompts)
        prompts = list(self._prompts)
        for prompt in self._prompts:
            cut = self._rng.randint(1, len(prompt))
            prompts.append(prompt[:cut])
            prompts.append(prompt[:cut] + tuple(reversed(prompt[-2:])))
        fresh = self._prompts[self._wave % len(self._prompts)]
        prompts.append(fresh[self._wave :] + fresh[: self._wave])
        self._rng.shuffle(prompts)
        return prompts

    def _step(self) -> None:
        stage, chances, rng = self._stage, self._scenario.likelihoods, self._rng
        live = stage.live_req_ids
        if live and rng.random() < chances.aborted_between:
            stage.abort(rng.choice(live))
        for waiting in stage.unconsumed:
            if self._due[waiting.step_id] <= self.num_steps or len(stage.unconsumed) >= stage.config.staging_depth:
                self._consume(waiting)
        step = stage.step(faults=self._faults)
        if step is not None:
            self._due[step.step_id] = self.num_steps + rng.randint(0, self._scenario.max_steps_late)
        self.num_steps += 1
        stage.collect()

    def _consume(self, step: SavedStep) -> None:
        stage, chances, rng = self._stage, self._scenario.likelihoods, self._rng
        choice = rng.random()
        if choice < chances.discarded:
            stage.discard(step)
        elif choice < chances.discarded + chances.partly_asked:
            stage.build(step, tuple(rng.sample(step.req_ids, rng.randint(0, len(step.req_ids)))))
        else:
            stage.build(step)

    def _faults(self, schedule: SimSchedule) -> StepFaults:
        chance = self._scenario.likelihoods.aborted_before_forward
        # Not in the first wave: whoever hits a prompt whose forward never ran is refused, again and again.
        if not schedule.runs or self._wave == 0 or self._rng.random() >= chance:
            return NO_FAULTS
        # The longest run is the one whose blocks others of the step may have hit.
        longest = max(schedule.runs, key=lambda run: run.num_tokens)
        return StepFaults(abort_before_forward=frozenset({longest.req_id}))
