# SPDX-License-Identifier: Apache-2.0
"""Seeded random workloads for one simulated stage: everything a seed decides, and a report of what was checked.

A workload mixes what a cache finds hard: prompts that share prefixes, cold bursts of equal prompts, a block pool so
small that blocks change hands all the time, keys that come in some steps only, padded and unpadded keys, aborts at
every point, forwards that never run, and outputs built late, out of order, for some requests only, or never.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from omni_core.runtime import Runtime
from omni_core.testing.fake_model import FakeKey, FakeModel, hidden_key
from omni_core.testing.oracle import RowKind
from omni_core.testing.sim_engine import NO_FAULTS, SavedStep, StepFaults
from omni_core.testing.sim_request import ImageSpan, SimRequest
from omni_core.testing.sim_scheduler import LostForward, ScheduledRun, SchedulerConfig, SimSchedule
from omni_core.testing.sim_stage import CacheFactory, SimStage, StageConfig

KEY_PALETTE: tuple[FakeKey, ...] = (
    FakeKey("mm_feature", (16,), torch.float32),
    FakeKey("codes.audio", (4, 3), torch.int64),
    FakeKey("layers.10", (2, 2, 5), torch.bfloat16),
    FakeKey("scores", (7,), torch.float16, padded=False),
)
"""Further keys of workloads: their own widths, ranks, dtypes and padding."""


@dataclass(frozen=True, slots=True)
class Likelihoods:
    """Chances, between 0 and 1."""

    key_emitted: float = 0.6
    """A further key is emitted in a step."""
    abort_between: float = 0.04
    """Before a step, some request is aborted."""
    abort_before_forward: float = 0.04
    """Some request of a step is aborted between schedule and forward."""
    forward_lost: float = 0.02
    """A step's forward never runs."""
    sent_again: float = 0.5
    """A burst repeats a request whose rows were lost, as clients do."""
    discarded: float = 0.08
    """A step is discarded instead of materialised."""
    partly_asked: float = 0.08
    """A step is materialised for some of its requests."""
    collected: float = 0.7
    """Finished outputs are judged and released after a step, instead of being held."""


LOSSY = Likelihoods(abort_before_forward=0.3, forward_lost=0.1, sent_again=0.8)
"""Forwards that often never run, and clients that send their requests again."""


@dataclass(frozen=True, slots=True)
class WorkloadConfig:
    """Everything about a workload but its random choices."""

    stage: StageConfig
    hidden: FakeKey
    keys: tuple[FakeKey, ...]
    num_requests: int = 40
    num_prefixes: int = 4
    """Distinct long prefixes that prompts start with."""
    max_prompt_tokens: int = 64
    max_output_tokens: int = 6
    largest_burst: int = 6
    """Most requests submitted at one time."""
    equal_burst: float = 0.4
    """Chance that the requests of a burst are one prompt repeated."""
    max_steps_late: int = 3
    likelihoods: Likelihoods = field(default_factory=Likelihoods)

    @classmethod
    def draw(cls, seed: int) -> WorkloadConfig:
        """A configuration that depends on `seed` alone."""
        rng = random.Random(f"workload config {seed}")
        block_size = rng.choice((1, 2, 4, 4, 8, 16))
        max_prompt_tokens = rng.choice((24, 48, 80))
        max_output_tokens = rng.choice((1, 2, 8))
        largest_request = -(-(max_prompt_tokens + max_output_tokens) // block_size)
        max_num_tokens = rng.choice((16, 32, 64, 128))
        captured = rng.random() < 0.5
        bursts = rng.random() < 0.5
        losses = rng.random() < 0.25
        scheduler = SchedulerConfig(
            num_blocks=1 + largest_request * rng.choice((2, 2, 3, 6)),
            block_size=block_size,
            max_num_tokens=max_num_tokens,
            max_num_requests=8 if bursts else rng.choice((2, 4, 8)),
            max_chunk_tokens=rng.choice((None, None, 5, 12)),
            partial_block_hits=block_size > 1 and rng.random() < 0.2,
        )
        staging_depth = rng.choice((2, 3, 4))
        stage = StageConfig(
            scheduler,
            staging_depth=staging_depth,
            capture_sizes=tuple(sorted({4, 8, max_num_tokens // 2, max_num_tokens})) if captured else (),
            declare_keys=rng.random() < 0.7,
            threaded_builder=rng.random() < 0.4,
            shuffle_batch_seed=seed,
            leftovers=rng.random() < 0.4,
            backend_options={"copy_latency_s": rng.choice((0.0, 0.0, 0.0005))},
        )
        return cls(
            stage,
            hidden_key(rng.choice((2, 8, 24)), rng.choice((torch.float32, torch.bfloat16))),
            tuple(sorted(rng.sample(KEY_PALETTE, rng.randint(0, 3)), key=lambda key: key.name)),
            num_prefixes=rng.choice((2, 4, 8)),
            max_prompt_tokens=max_prompt_tokens,
            max_output_tokens=max_output_tokens,
            max_steps_late=rng.choice((0, 2, 4)),
            equal_burst=0.9 if bursts else 0.3,
            likelihoods=LOSSY if losses else Likelihoods(),
        )

    @classmethod
    def draw_cramped(cls, seed: int) -> WorkloadConfig:
        """One whose pool holds hardly more than one request, so that hit blocks change hands in the next step.

        With a runtime that stalls reads, rows are overwritten while a read still wants them.
        """
        config = cls.draw(seed)
        scheduler = config.stage.scheduler
        cramped = replace(
            scheduler,
            num_blocks=1 + -(-25 // scheduler.block_size),
            max_chunk_tokens=None,
            max_num_requests=3,
        )
        return replace(
            config,
            stage=replace(config.stage, scheduler=cramped, staging_depth=4),
            num_requests=60,
            num_prefixes=2,
            max_prompt_tokens=24,
            max_output_tokens=1,
            max_steps_late=4,
        )


@dataclass(frozen=True, slots=True)
class WorkloadReport:
    """What one workload did and what of it was judged. A report exists only if every delivery was right."""

    seed: int
    config: WorkloadConfig
    num_steps: int
    num_requests: int
    rows: Mapping[RowKind, int]
    """Rows (for `HASHED_NEVER_COMPUTED`: refused positions) by kind; a row can be of several kinds."""
    rows_delivered: int
    rows_computed: int
    """Rows of all forwards, each key counted."""
    requests_failed: int
    """Requests that hit blocks whose rows were never computed, and were refused."""
    requests_partial: int
    """Requests that ended with rows reported missing, because their steps were discarded."""
    requests_aborted: int
    rows_rescued: int
    """Rows the cache set aside because a read still wanted them when their slot was overwritten."""


def total_rows(reports: Iterable[WorkloadReport]) -> Counter[RowKind]:
    """Rows by kind over several workloads."""
    total: Counter[RowKind] = Counter()
    for report in reports:
        total.update(report.rows)
    return total


def run_workload(
    seed: int,
    config: WorkloadConfig | None = None,
    *,
    runtime: Runtime | None = None,
    make_cache: CacheFactory | None = None,
) -> WorkloadReport:
    """Run one workload and judge every delivery. Blocks until it is done: a fraction of a second.

    Args:
        seed: decides every random choice; with a single-threaded builder the run is the same each time.
        config: default: the one `seed` draws.
        runtime: default: real threads.
        make_cache: another cache than the real one, to try the judge.

    Raises:
        OracleViolationError: a delivery was wrong. A note on it names the seed, the step and the configuration.
        OmniPrefixCacheError: the cache raised where a right one does not.
    """
    config = config or WorkloadConfig.draw(seed)
    workload = _Workload(seed, config, runtime, make_cache)
    try:
        return workload.run()
    except Exception as error:
        error.add_note(f"workload seed={seed}, step {workload.num_steps}, {config}")
        raise


class _Workload:
    def __init__(
        self, seed: int, config: WorkloadConfig, runtime: Runtime | None, make_cache: CacheFactory | None
    ) -> None:
        self._seed = seed
        self._config = config
        self._rng = random.Random(seed)
        self._stage = SimStage(
            config.stage, FakeModel(config.hidden, config.keys), runtime=runtime, make_cache=make_cache
        )
        self._prefixes = [self._tokens(config.max_prompt_tokens) for _ in range(config.num_prefixes)]
        self._num_submitted = 0
        self._due: dict[int, int] = {}
        self.num_steps = 0
        self._num_aborted = 0
        self._lost: list[SimRequest] = []

    def run(self) -> WorkloadReport:
        with self._stage as stage:
            if not self._config.stage.declare_keys:
                self._first_step_decides_keys()
            while self._num_submitted < self._config.num_requests or stage.engine.scheduler.has_news:
                self._submit_some()
                self._abort_some()
                self._consume_due_steps()
                self._step()
                if self._rng.random() < self._config.likelihoods.collected:
                    stage.collect()
            stage.finish()
            oracle, stats = stage.oracle, stage.stats()
            return WorkloadReport(
                seed=self._seed,
                config=self._config,
                num_steps=self.num_steps,
                num_requests=self._num_submitted,
                rows=oracle.counts,
                rows_delivered=oracle.rows_delivered,
                rows_computed=stage.tap.num_rows,
                requests_failed=oracle.requests_failed,
                requests_partial=oracle.requests_partial,
                requests_aborted=self._num_aborted,
                rows_rescued=stats.rows_rescued if stats else 0,
            )

    def _first_step_decides_keys(self) -> None:
        """A lone prompt with every key: what each key is, is decided before any of them is left out."""
        self._submit(SimRequest("first", tuple(self._tokens(4))))
        step = self._stage.step()
        if step is None:
            raise RuntimeError("the first step computed nothing")
        self._stage.build(step)

    def _submit_some(self) -> None:
        rng, config = self._rng, self._config
        if self._num_submitted >= config.num_requests or rng.random() < 0.4:
            return
        count = min(rng.randint(1, config.largest_burst), config.num_requests - self._num_submitted)
        if self._lost and rng.random() < config.likelihoods.sent_again:
            burst = [self._lost.pop()] * count
        elif rng.random() < config.equal_burst:
            burst = [self._request()] * count
        else:
            burst = [self._request() for _ in range(count)]
        for request in burst:
            req_id = f"r{self._num_submitted}"
            self._submit(
                SimRequest(req_id, request.prompt_token_ids, request.max_output_tokens, request.images, request.salt)
            )

    def _submit(self, request: SimRequest) -> None:
        self._stage.submit(request)
        self._num_submitted += 1

    def _request(self) -> SimRequest:
        rng, config = self._rng, self._config
        length = rng.randint(1, config.max_prompt_tokens)
        shared = rng.randint(0, length)
        prefix = rng.choice(self._prefixes)[:shared]
        prompt = (*prefix, *self._tokens(length - len(prefix)))
        images: tuple[ImageSpan, ...] = ()
        if length >= 8 and rng.random() < 0.15:
            # Placeholder tokens are all alike: only the identity tells the images apart.
            span = ImageSpan(rng.randint(0, 3), rng.randint(3, length - 4), rng.choice(("cat", "dog")))
            stop = span.offset + span.length
            prompt = (*prompt[: span.offset], *([9] * span.length), *prompt[stop:])
            images = (span,)
        salt = rng.choice(("", "", "", "", "voice"))
        return SimRequest("template", prompt, rng.randint(1, config.max_output_tokens), images, salt)

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(10, 10_000) for _ in range(count)]

    def _abort_some(self) -> None:
        scheduler = self._stage.engine.scheduler
        if self._rng.random() < self._config.likelihoods.abort_between:
            candidates = [*scheduler.waiting, *scheduler.running]
            if candidates:
                self._num_aborted += self._stage.abort(self._rng.choice(candidates))

    def _consume_due_steps(self) -> None:
        stage, rng = self._stage, self._rng
        waiting = list(stage.unconsumed)
        rng.shuffle(waiting)
        for step in waiting:
            if self._due[step.step_id] <= self.num_steps:
                self._consume(step)
        while len(stage.unconsumed) >= self._config.stage.staging_depth:
            self._consume(rng.choice(stage.unconsumed))

    def _consume(self, step: SavedStep) -> None:
        rng, likelihoods = self._rng, self._config.likelihoods
        choice = rng.random()
        if choice < likelihoods.discarded:
            self._stage.discard(step)
        elif choice < likelihoods.discarded + likelihoods.partly_asked:
            self._stage.build(step, tuple(rng.sample(step.req_ids, rng.randint(0, len(step.req_ids)))))
        else:
            self._stage.build(step)

    def _step(self) -> None:
        emitted = frozenset(
            key.name for key in self._config.keys if self._rng.random() < self._config.likelihoods.key_emitted
        )
        step = self._stage.step(emitted=emitted, faults=self._faults)
        if step is not None:
            self._due[step.step_id] = self.num_steps + self._rng.randint(0, self._config.max_steps_late)
        self.num_steps += 1

    def _faults(self, schedule: SimSchedule) -> StepFaults:
        rng, likelihoods = self._rng, self._config.likelihoods
        if not schedule.runs:
            return NO_FAULTS
        if rng.random() < likelihoods.forward_lost:
            what_then = rng.choice((LostForward.ABORTED, LostForward.ABORTED, LostForward.RETRIED))
            if what_then is LostForward.ABORTED:
                self._note_lost(schedule.runs)
            return StepFaults(lost_forward=what_then)
        if rng.random() < likelihoods.abort_before_forward:
            run = rng.choice(schedule.runs)
            self._note_lost([run])
            return StepFaults(abort_before_forward=frozenset({run.req_id}))
        return NO_FAULTS

    def _note_lost(self, runs: Sequence[ScheduledRun]) -> None:
        self._num_aborted += len(runs)
        self._lost.extend(run.track.request for run in runs)


def describe(reports: Iterable[WorkloadReport]) -> str:
    """A table of rows by kind over several workloads, for a terminal."""
    kept = list(reports)
    total = total_rows(kept)
    lines = [
        f"{len(kept)} workloads, {sum(report.num_steps for report in kept)} steps, "
        f"{sum(report.num_requests for report in kept)} requests "
        f"({sum(report.requests_aborted for report in kept)} aborted, "
        f"{sum(report.requests_failed for report in kept)} refused, "
        f"{sum(report.requests_partial for report in kept)} partial), "
        f"{sum(report.rows_delivered for report in kept)} rows delivered and judged, "
        f"{sum(report.rows_rescued for report in kept)} rescued"
    ]
    lines.extend(f"  {kind.value:<34}{total[kind]:>9}" for kind in RowKind)
    return "\n".join(lines)
