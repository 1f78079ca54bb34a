# SPDX-License-Identifier: Apache-2.0
"""Runs a workload into the faults of a plan, and judges what the cache makes of them.

Whatever goes wrong: every error has a type, nothing hangs, a failed cache says so to everyone until it is reset, and
after `reset()` it holds nothing and serves a whole workload as a new one does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from omni_core.backend.base import DeviceBackend
from omni_core.backend.registry import create_backend
from omni_core.prefix_cache.config import PrefixCacheConfig
from omni_core.prefix_cache.errors import CacheFailedError, HostMemoryError, JoinTimeoutError, ReadFailedError
from omni_core.prefix_cache.events import StepEvents, StepLayout
from omni_core.prefix_cache.manager import OmniPrefixCacheManager
from omni_core.prefix_cache.policy import ModelCachePolicy
from omni_core.runtime import Runtime
from omni_core.testing.fault_injection import FaultInjector, InjectedFault, InjectedMemoryError
from omni_core.testing.fault_plan import BUILDER, LONG_S, PREFETCHER, Fault, FaultKind, FaultPlan
from omni_core.testing.row_judge import OracleViolationError
from omni_core.testing.stage_cache import StageCache
from omni_core.testing.workload_config import WorkloadConfig
from omni_core.testing.workloads import WorkloadReport, run_workload

_PATIENCE_S = 2 * LONG_S
"""Enough for the slowest copy of a plan to end."""


class FaultOutcomeError(AssertionError):
    """A fault had an outcome it must not have; names plan, error and what was expected."""


@dataclass(frozen=True, slots=True)
class FaultRunReport:
    """What a plan's faults came to."""

    plan: FaultPlan
    injected: tuple[Fault, ...]
    """Those that happened; a workload may end before a fault's turn comes."""
    error: BaseException | None
    """What the run ended with; `None`: it was whole."""
    sticky: bool
    """Whether the cache had failed and refused everything until it was reset."""
    after: WorkloadReport
    """The run after `reset()`."""


def run_with_faults(
    seed: int, plan: FaultPlan, runtime: Runtime, config: WorkloadConfig | None = None
) -> FaultRunReport:
    """Run a workload into `plan`, reset the cache, run another one, close everything.

    Args:
        seed: of the workloads.
        plan: the faults.
        runtime: with virtual time, unless the plan has no delays.
        config: of the workloads; default: the one `seed` draws.

    Raises:
        FaultOutcomeError: an outcome is not one a fault of the plan may have.
        OracleViolationError: after the reset, a delivery was wrong.
    """
    injector = FaultInjector(plan, runtime, seed)
    with injector.on_engine_thread():
        return _FaultRun(seed, plan, injector, config or WorkloadConfig.draw(seed)).run()


class _FaultRun:
    def __init__(self, seed: int, plan: FaultPlan, injector: FaultInjector, config: WorkloadConfig) -> None:
        self._seed = seed
        self._plan = plan
        self._injector = injector
        # The stage makes a backend of its own for its graph sizes only; the cache has another.
        self._config = replace(config, stage=replace(config.stage, backend_options={}))
        self._backend: DeviceBackend = create_backend(
            config.stage.backend,
            runtime=injector.runtime,
            options={**config.stage.backend_options, "observer": injector},
        )
        self._manager: OmniPrefixCacheManager | None = None
        self._layout_source: Callable[[], StepLayout] | None = None

    def run(self) -> FaultRunReport:
        error = self._run_into_faults()
        manager = self._built()
        sticky = self._check_stickiness(manager, error)
        self._injector.armed = False
        self._reset(manager)
        self._require_nothing_held(manager)
        # Of requests the reset ended, also by steps it took from a builder in the middle of them: the ids come again.
        manager.take_partial_requests()
        after = self._run_workload(self._seed + 1)
        manager.flush()
        self._require_nothing_held(manager)
        self._close(manager)
        return FaultRunReport(self._plan, tuple(self._injector.injected), error, sticky, after)

    def _run_into_faults(self) -> BaseException | None:
        for _ in range(1 + len(self._plan.of(FaultKind.ARENA_REFUSED))):
            try:
                self._run_workload(self._seed)
            except InjectedMemoryError as error:
                if self._manager is not None:
                    return error
                if self._injector.live_arenas:
                    raise self._wrong(error, f"{self._injector.live_arenas} arenas are left behind") from error
            except BaseException as error:
                if not self._may_be(error):
                    raise self._wrong(error, "no fault of the plan explains it") from error
                return error
            else:
                return None
        raise self._wrong(None, "the cache could not be built")

    def _run_workload(self, seed: int) -> WorkloadReport:
        return run_workload(seed, self._config, runtime=self._injector.runtime, make_cache=self._make_cache)

    def _make_cache(
        self, config: PrefixCacheConfig, policy: ModelCachePolicy, layout_source: Callable[[], StepLayout]
    ) -> StageCache:
        self._layout_source = layout_source
        if self._manager is None:
            manager = OmniPrefixCacheManager(
                config, self._backend, self._layout, runtime=self._injector.runtime, device=torch.device("cpu")
            )
            try:
                manager.register_policy(policy)
            except MemoryError:
                manager.close()
                raise
            self._manager = manager
        return self._injector.wrap(self._manager)

    def _layout(self) -> StepLayout:
        if self._layout_source is None:
            raise RuntimeError("no engine is running")
        return self._layout_source()

    def _built(self) -> OmniPrefixCacheManager:
        if self._manager is None:
            raise self._wrong(None, "the cache was never built")
        return self._manager

    # -- outcomes

    def _may_be(self, error: BaseException) -> bool:
        """Whether some fault that happened explains this error."""
        happened = self._injector.injected
        late = any(fault.seconds >= LONG_S for fault in happened)
        if isinstance(error, InjectedFault):
            return True
        if isinstance(error, CacheFailedError):
            cause = error.__cause__
            return isinstance(cause, InjectedFault) or isinstance(_root(cause), InjectedFault) or late
        if isinstance(error, HostMemoryError):  # address space for a key's rows was refused
            return isinstance(_root(error), InjectedFault)
        if isinstance(error, TimeoutError):
            # A builder that died takes no step any more: the engine finds every page held.
            builder_died = any(fault.thread == BUILDER or fault.kind is FaultKind.SINK_FAILS for fault in happened)
            return late or builder_died
        if isinstance(error, OracleViolationError):
            # The judge knows no faults: to it, a read that failed is a row that was withheld.
            reads_failed = any(fault.thread == PREFETCHER for fault in happened) or late
            return isinstance(error.__cause__, ReadFailedError) and reads_failed
        return False

    def _check_stickiness(self, manager: OmniPrefixCacheManager, error: BaseException | None) -> bool:
        """A failed cache refuses every call, again and again; one that has not failed refuses none."""
        answers = []
        calls: tuple[Callable[[], object], ...] = (
            lambda: manager.new_step_starts(StepEvents()),
            manager.flush,
            lambda: manager.new_step_starts(StepEvents()),
        )
        for call in calls:
            try:
                call()
            except CacheFailedError:
                answers.append(True)
            except JoinTimeoutError as late:
                if not self._plan.exceeds_timeouts:
                    raise self._wrong(late, "nothing is that late") from late
                answers.append(False)
            else:
                answers.append(False)
        if isinstance(error, CacheFailedError) and not all(answers):
            raise self._wrong(error, "the failure was forgotten without a reset")
        if answers != sorted(answers):
            raise self._wrong(error, f"the failure comes and goes: {answers}")
        return answers[-1]

    def _reset(self, manager: OmniPrefixCacheManager) -> None:
        try:
            manager.reset()
        except JoinTimeoutError as error:
            if not self._plan.exceeds_timeouts:
                raise self._wrong(error, "no write takes that long") from error
            self._injector.runtime.sleep(_PATIENCE_S)
            manager.reset()

    def _require_nothing_held(self, manager: OmniPrefixCacheManager) -> None:
        # A page whose copy nobody waits for any more is free once that copy has ended.
        self._injector.runtime.sleep(_PATIENCE_S)
        stats = manager.stats()
        held = {
            "open_steps": stats.open_steps,
            "live_requests": stats.live_requests,
            "live_reads": stats.live_reads,
            "pinned_slots": stats.pinned_slots,
            "staging_slots_in_use": stats.staging_slots_in_use,
            "queued_writes": stats.queued_writes,
            "deferred_records": stats.deferred_records,
            "deferred_bytes": stats.deferred_bytes,
            "deferred_writes_open": stats.deferred_writes_open,
        }
        left = {name: count for name, count in held.items() if count}
        if left:
            raise self._wrong(None, f"after reset and rest the cache holds {left}")

    def _close(self, manager: OmniPrefixCacheManager) -> None:
        if not manager.close():
            raise self._wrong(None, "the cache did not close")
        self._backend.close()
        if self._injector.live_arenas:
            raise self._wrong(None, f"{self._injector.live_arenas} arenas are left after close")

    def _wrong(self, error: BaseException | None, why: str) -> FaultOutcomeError:
        happened = "; ".join(map(str, self._injector.injected)) or "none"
        return FaultOutcomeError(
            f"workload seed {self._seed}, plan [{self._plan}], happened [{happened}]: "
            f"{type(error).__name__ if error else 'no error'}: {error}: {why}"
        )


def _root(error: BaseException | None) -> BaseException | None:
    while error is not None and error.__cause__ is not None:
        error = error.__cause__
    return error
