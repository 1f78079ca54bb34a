# SPDX-License-Identifier: Apache-2.0
"""A simulated stage around an author's model: engine, the real cache, and the judge of what it delivers."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self

from omni_core.backend.registry import create_backend
from omni_core.prefix_cache.policy import ModelCachePolicy
from omni_core.prefix_cache.stats import CacheStats
from omni_core.runtime import Runtime, ThreadingRuntime
from omni_core.testing.engine_schedule import SimSchedule
from omni_core.testing.model_check.calls import ModelCaller, ModelForward, StageModel
from omni_core.testing.model_check.engine import ModelEngine
from omni_core.testing.model_check.judge import TappedRowJudge
from omni_core.testing.model_check.stage_config import ModelStageConfig
from omni_core.testing.oracle import StageOracle
from omni_core.testing.output_builder import BuildOrder, BuiltStep, InlineBuilder
from omni_core.testing.sim_request import SimRequest
from omni_core.testing.sim_scheduler import SimScheduler
from omni_core.testing.sim_step import SavedStep, StepFaults
from omni_core.testing.stage_stats import check_at_rest
from omni_core.testing.tap import RowTap

FLUSH_TIMEOUT_S = 60.0
"""How long `finish` waits for the cache's writes."""


class ModelStage:
    """The stage. One thread, the engine's; a context manager that closes cache and backend.

    Submit requests, `step`, then `build` or `discard` each saved step, now or later, and `collect`: every delivered row
    is held, bit for bit, against what the model computed for that prefix in this run. `finish` judges the run as a
    whole. The first prompt is run through the model once more than any engine would, to learn the width of its rows.

    Args:
        model: the model.
        config: the stage.
        policy: what the model says about its outputs; default: its `omni_cache_policy`.
        runtime: makes all threads and locks; default: real ones.
        watch: shown each forward.

    Raises:
        InvalidConfigError: the model's `omni_cache_policy` is no policy.
    """

    def __init__(
        self,
        model: StageModel,
        config: ModelStageConfig | None = None,
        *,
        policy: ModelCachePolicy | None = None,
        runtime: Runtime | None = None,
        watch: Callable[[ModelForward], None] = lambda forward: None,
    ) -> None:
        self.config = config or ModelStageConfig()
        self.policy = ModelCachePolicy.from_model(model) if policy is None else policy
        keeps_hidden = self.policy.needs_full_hidden_states
        self._watch = watch
        self.caller = ModelCaller(model, keeps_hidden=keeps_hidden, watch=self._saw)
        self.tap = RowTap()
        self.judge = TappedRowJudge(self.tap, keeps_hidden=keeps_hidden, contents=lambda: self.oracle.ledger.contents)
        self.oracle = StageOracle(
            self.judge,
            self.config.scheduler.block_size,
            self.tap,
            deferred_keys=self.policy.deferred_keys,
            digests_told=self.config.scheduler.block_digests,
        )
        self._runtime = runtime or ThreadingRuntime()
        self._backend = create_backend(self.config.backend, runtime=self._runtime, options=self.config.backend_options)
        self._engine: ModelEngine | None = None
        self._builder: InlineBuilder | None = None
        self._unconsumed: dict[int, SavedStep] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def has_news(self) -> bool:
        """Whether a step would compute or report anything, now or later."""
        return self._engine is not None and self._engine.scheduler.has_news

    @property
    def live_req_ids(self) -> tuple[str, ...]:
        """Ids of requests that have not ended, those that wait first."""
        scheduler = self._scheduler()
        return (*scheduler.waiting, *scheduler.running)

    @property
    def unconsumed(self) -> tuple[SavedStep, ...]:
        """Saved steps that were neither built nor discarded, oldest first."""
        return tuple(self._unconsumed.values())

    def stats(self) -> CacheStats | None:
        """The cache's counters; `None` if nothing was submitted yet."""
        return None if self._engine is None else self._engine.cache.stats()

    def submit(self, request: SimRequest) -> None:
        """Queue a request.

        Raises:
            ValueError: it has images or a salt, which the model would not see; or it could never be admitted.
            AuthoredModelError: it is the first, and the model raised, or returned what no stage can take.
        """
        if request.images or request.salt:
            raise ValueError(f"request {request.req_id!r}: a model is given token ids only, no images and no salt")
        if self._engine is None:
            self._engine = ModelEngine(
                self.config,
                self.policy,
                self.caller,
                self.oracle.ledger,
                self._backend,
                self._runtime,
                request.prompt_token_ids,
            )
            self._builder = InlineBuilder(self._engine.cache, self._engine.counter)
        self._engine.scheduler.add(request)

    def abort(self, req_id: str) -> bool:
        """Abort a request between two steps. `False`: the id is not known (any more)."""
        return self._scheduler().abort(req_id)

    def step(self, *, faults: Callable[[SimSchedule], StepFaults] | None = None) -> SavedStep | None:
        """Run one engine step. A saved step must be given to `build` or `discard` later.

        Args:
            faults: asked once the step is scheduled.

        Returns:
            The saved step, or `None` if nothing was computed.

        Raises:
            RuntimeError: `staging_depth` steps wait already: the cache would block; or nothing was submitted yet.
            AuthoredModelError: the model raised, or returned what no stage can take.
        """
        if len(self._unconsumed) >= self.config.staging_depth:
            raise RuntimeError(
                f"steps {list(self._unconsumed)} wait to be built, and staging_depth={self.config.staging_depth}: "
                "build or discard one first"
            )
        step = self._opened().step(faults)
        if step is not None:
            self._unconsumed[step.step_id] = step
        return step

    def build(self, step: SavedStep, req_ids: tuple[str, ...] | None = None) -> None:
        """Have a step materialised, for `req_ids` or for all its requests."""
        self._order(step, step.req_ids if req_ids is None else req_ids)

    def discard(self, step: SavedStep) -> None:
        """Have a step discarded; its rows come with later steps."""
        self._order(step, None)

    def collect(self, visit: Callable[[BuiltStep], None] | None = None) -> None:
        """Judge and release what was built.

        Args:
            visit: shown each judged step before its outputs are released.

        Raises:
            OracleViolationError: a delivery is wrong.
        """
        for built in self._builder.collect() if self._builder else ():
            self.oracle.check(built)
            if visit is not None:
                visit(built)
            if built.outputs is not None:
                built.outputs.release()

    def run_to_end(self, visit: Callable[[BuiltStep], None] | None = None) -> None:
        """Step until every request has ended and been reported, building each step at once; then `finish`."""
        while self.has_news:
            for step in self.unconsumed:
                self.build(step)
            self.step()
            self.collect(visit)
        self.finish(visit)

    def finish(self, visit: Callable[[BuiltStep], None] | None = None) -> None:
        """Build what is left and judge the whole run. Every request must have ended and been reported.

        Raises:
            OracleViolationError: a row is unaccounted for, or the cache still holds something of an ended request.
        """
        for step in self.unconsumed:
            self.build(step)
        self.collect(visit)
        cache = self._opened().cache
        self.oracle.check_ended(cache.take_partial_requests())
        cache.flush(FLUSH_TIMEOUT_S)
        check_at_rest(cache.stats(), self.oracle.rows_kept)

    def close(self) -> None:
        """End the cache and the backend."""
        if self._engine is not None:
            self._engine.cache.close()
        self._backend.close()

    def _saw(self, forward: ModelForward) -> None:
        self.judge.hidden_comes = forward.hidden is not None
        self._watch(forward)

    def _order(self, step: SavedStep, req_ids: tuple[str, ...] | None) -> None:
        del self._unconsumed[step.step_id]
        if self._builder is not None:
            self._builder.submit(BuildOrder(step, req_ids, self._opened().counter.announced - step.number))

    def _scheduler(self) -> SimScheduler:
        return self._opened().scheduler

    def _opened(self) -> ModelEngine:
        if self._engine is None:
            raise RuntimeError("nothing was submitted yet")
        return self._engine
