# SPDX-License-Identifier: Apache-2.0
"""One simulated stage, ready to use: engine, cache under test, output builder, oracle and tap.

Submit requests, `step`, then `build` or `discard` each saved step, now or some steps later, and `collect`: every
delivery is judged by the oracle, then released. `finish` judges the run as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from types import TracebackType
from typing import Self

import torch

from omni_core.backend.registry import create_backend
from omni_core.prefix_cache.config import Delivery, PrefixCacheConfig
from omni_core.prefix_cache.events import StepLayout
from omni_core.prefix_cache.manager import OmniPrefixCacheManager
from omni_core.prefix_cache.policy import ModelCachePolicy
from omni_core.prefix_cache.stats import CacheStats
from omni_core.runtime import Runtime, ThreadingRuntime
from omni_core.testing.engine_schedule import EngineScheduler, SimSchedule
from omni_core.testing.fake_model import FakeModel
from omni_core.testing.oracle import StageOracle
from omni_core.testing.output_builder import BuildOrder, BuiltStep, InlineBuilder, OutputBuilder, ThreadedBuilder
from omni_core.testing.sampling import SimDrafter
from omni_core.testing.scheduler_config import SchedulerConfig
from omni_core.testing.sim_engine import REQUEST_ENTRIES_KEY, EngineConfig, SimEngine
from omni_core.testing.sim_request import SimRequest
from omni_core.testing.sim_scheduler import SimScheduler
from omni_core.testing.sim_step import SavedStep, StepFaults
from omni_core.testing.stage_cache import StageCache
from omni_core.testing.stage_config import StageConfig
from omni_core.testing.stage_stats import check_at_rest, check_deferred_budget
from omni_core.testing.tap import RowTap

__all__ = ["BUILD_TIMEOUT_S", "CacheFactory", "CacheWrapper", "SchedulerFactory", "SimStage", "StageConfig"]

BUILD_TIMEOUT_S = 60.0
"""How long a stage waits for its builder thread."""

CacheFactory = Callable[[PrefixCacheConfig, ModelCachePolicy, Callable[[], StepLayout]], StageCache]
"""Makes another cache than `OmniPrefixCacheManager`, to try the judge itself."""

CacheWrapper = Callable[[StageCache], StageCache]
"""Puts something around the real cache, to watch it or to break it."""

SchedulerFactory = Callable[[SchedulerConfig], EngineScheduler]
"""Makes another scheduler than `SimScheduler`."""

Acknowledgement = Callable[[BuiltStep], Collection[str]]
"""Says of a judged step, built with `Delivery.TWO_PHASE`, which of its served requests' rows arrived."""


class SimStage:
    """The stage. One thread, the engine's; a context manager that closes cache, backend and builder.

    Args:
        config: the stage.
        model: its model.
        runtime: makes all threads and locks; default: real ones.
        make_cache: another cache to put in place of the real one.
        make_scheduler: another scheduler to put in place of the simulated one.
        wrap_cache: put around the real cache: what it returns is called in its place.
    """

    def __init__(
        self,
        config: StageConfig,
        model: FakeModel,
        *,
        runtime: Runtime | None = None,
        make_cache: CacheFactory | None = None,
        make_scheduler: SchedulerFactory | None = None,
        wrap_cache: CacheWrapper | None = None,
    ) -> None:
        self.config = config
        self.model = model
        self.tap = RowTap()
        self.oracle = StageOracle(
            model,
            config.scheduler.block_size,
            self.tap,
            deferred_keys=config.deferred_keys,
            digests_told=config.scheduler.block_digests,
        )
        self._runtime = runtime or ThreadingRuntime()
        self._backend = create_backend(config.backend, runtime=self._runtime, options=config.backend_options)
        self._padding = self._backend.graph_padding(config.capture_sizes)
        self._make_other_cache = make_cache
        self._wrap_cache = wrap_cache
        self._manager: OmniPrefixCacheManager | None = None
        self._unconsumed: dict[int, SavedStep] = {}
        engine_config = EngineConfig(
            config.scheduler,
            padded_num_tokens=self._padding.padded,
            max_num_tokens_padded=max(config.capture_sizes, default=None),
            shuffle_batch_seed=config.shuffle_batch_seed,
            leftovers=config.leftovers,
            kernel_block_size=config.kernel_block_size,
        )
        scheduler = self._sim_scheduler() if make_scheduler is None else make_scheduler(config.scheduler)
        self.engine = SimEngine(engine_config, model, scheduler, self._make_cache, (self.oracle.ledger,))
        self._builder: OutputBuilder = (
            ThreadedBuilder(self.engine.cache, self.engine.counter, self._runtime)
            if config.threaded_builder
            else InlineBuilder(self.engine.cache, self.engine.counter)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def manager(self) -> OmniPrefixCacheManager:
        """The real cache.

        Raises:
            RuntimeError: the stage was made with another one.
        """
        if self._manager is None:
            raise RuntimeError("the stage was made with make_cache and has no OmniPrefixCacheManager")
        return self._manager

    def stats(self) -> CacheStats | None:
        """The real cache's counters; `None` if the stage was made with another one."""
        return None if self._manager is None else self._manager.stats()

    @property
    def unconsumed(self) -> tuple[SavedStep, ...]:
        """Saved steps not yet given to the builder, oldest first."""
        return tuple(self._unconsumed.values())

    def submit(self, request: SimRequest) -> None:
        """Queue a request."""
        self.engine.submit(request)

    def abort(self, req_id: str) -> bool:
        """Abort a request between two steps."""
        return self.engine.abort(req_id)

    def step(
        self, *, emitted: frozenset[str] | None = None, faults: Callable[[SimSchedule], StepFaults] | None = None
    ) -> SavedStep | None:
        """Run one engine step; see `SimEngine.step`. A saved step must be given to `build` or `discard` later.

        Raises:
            RuntimeError: `staging_depth` steps wait already; the cache would block.
            OracleViolationError: deferred rows hold more device memory than they may.
        """
        if len(self._unconsumed) >= self.config.staging_depth:
            raise RuntimeError(
                f"steps {[step.step_id for step in self.unconsumed]} wait to be built, and "
                f"staging_depth={self.config.staging_depth}: build or discard one first"
            )
        step = self.engine.step(emitted=emitted, faults=faults)
        if step is not None:
            self._unconsumed[step.step_id] = step
        self._check_budget()
        return step

    def build(self, step: SavedStep, req_ids: tuple[str, ...] | None = None) -> None:
        """Have a step materialised, for `req_ids` or for all its requests."""
        self._order(step, step.req_ids if req_ids is None else req_ids)

    def discard(self, step: SavedStep) -> None:
        """Have a step discarded; its rows come with later steps."""
        self._order(step, None)

    def collect(
        self, visit: Callable[[BuiltStep], None] | None = None, *, acknowledged: Acknowledgement | None = None
    ) -> None:
        """Judge and release what the builder has finished.

        Args:
            visit: shown each judged step before its outputs are released.
            acknowledged: with `Delivery.TWO_PHASE`, asked what arrived; default: everything.

        Raises:
            OracleViolationError: a delivery is wrong.
        """
        for built in self._builder.collect():
            self.oracle.check(built)
            if visit is not None:
                visit(built)
            if built.outputs is not None:
                self._acknowledge(built, acknowledged)
                built.outputs.release()
        self._check_budget()

    def run_to_end(self, visit: Callable[[BuiltStep], None] | None = None) -> None:
        """Step until every request has ended and been reported, building each step at once; then `finish`."""
        while self.engine.scheduler.has_news:
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
        self._builder.wait_idle(BUILD_TIMEOUT_S)
        self.collect(visit)
        self.oracle.check_ended(self.engine.cache.take_partial_requests())
        if self._manager is not None:
            self._manager.flush(BUILD_TIMEOUT_S)
            check_at_rest(self._manager.stats(), self.oracle.rows_kept)

    def close(self) -> None:
        """End the builder, the cache and the backend."""
        self._builder.close()
        if self._manager is not None:
            self._manager.close()
        self._backend.close()

    def _acknowledge(self, built: BuiltStep, acknowledged: Acknowledgement | None) -> None:
        if self.config.delivery is not Delivery.TWO_PHASE or built.outputs is None:
            return
        if acknowledged is None:
            built.outputs.acknowledge()
            return
        arrived = acknowledged(built)
        built.outputs.acknowledge(arrived)
        self.oracle.taken_back(built, [req_id for req_id in built.outputs if req_id not in arrived])

    def _check_budget(self) -> None:
        if self._manager is not None and self.config.deferred_keys:
            check_deferred_budget(self._manager.stats(), self.config.device_staging_bytes)

    def _order(self, step: SavedStep, req_ids: tuple[str, ...] | None) -> None:
        del self._unconsumed[step.step_id]
        self._builder.submit(BuildOrder(step, req_ids, self.engine.counter.announced - step.number))

    def _sim_scheduler(self) -> SimScheduler:
        scheduler, seed = self.config.scheduler, self.config.scheduler.mishaps.seed
        drafter = SimDrafter(self.model, scheduler.max_draft_tokens, self.config.drafts_accepted, seed)
        return SimScheduler(scheduler, drafter)

    def _make_cache(self, layout_source: Callable[[], StepLayout]) -> StageCache:
        scheduler, hidden = self.config.scheduler, self.model.hidden
        config = PrefixCacheConfig(
            num_blocks=scheduler.num_blocks,
            block_size=scheduler.block_size,
            hidden_size=hidden.width,
            hidden_dtype=hidden.dtype,
            max_num_tokens=scheduler.max_num_tokens,
            staging_depth=self.config.staging_depth,
            extra_row_bytes=64 + sum(key.row_bytes for key in self.model.keys),
            device_staging_bytes=self.config.device_staging_bytes,
            delivery=self.config.delivery,
        )
        further = frozenset(key.name for key in self.model.keys) if self.config.declare_keys else frozenset()
        policy = ModelCachePolicy(
            token_keys=further - self.config.deferred_keys,
            request_keys=frozenset({REQUEST_ENTRIES_KEY}),
            deferred_keys=self.config.deferred_keys,
        )
        if self._make_other_cache is not None:
            return self._make_other_cache(config, policy, layout_source)
        self._manager = OmniPrefixCacheManager(
            config, self._backend, layout_source, runtime=self._runtime, device=torch.device("cpu")
        )
        self._manager.register_policy(policy)
        return self._manager if self._wrap_cache is None else self._wrap_cache(self._manager)
