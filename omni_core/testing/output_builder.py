# SPDX-License-Identifier: Apache-2.0
"""Turns saved steps into outputs: on the engine thread at once, or on a thread of its own while the engine runs on."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

from omni_core.prefix_cache.outputs import StageCacheOutputs
from omni_core.runtime import Runtime
from omni_core.testing.sim_step import SavedStep, StepCounter
from omni_core.testing.stage_cache import StageCache


@dataclass(frozen=True, slots=True)
class BuildOrder:
    """What is to become of a saved step."""

    step: SavedStep
    req_ids: tuple[str, ...] | None
    """Requests to materialise; `None` discards the step."""
    steps_late: int
    """Steps the engine had started since this one when the order was given."""


@dataclass(frozen=True, slots=True)
class BuiltStep:
    """A carried-out order. `outputs` is not released; `None` for a discarded step."""

    order: BuildOrder
    outputs: StageCacheOutputs | None
    announced_before: int
    """Number of the latest schedule the cache had been told of when the order was begun."""
    announcing_after: int
    """Number of the latest schedule the cache was being told of, or had been, when the order was done."""


class OutputBuilder(Protocol):
    """Carries out build orders. `submit`, `collect` and `close` belong to one thread, the engine's."""

    def submit(self, order: BuildOrder) -> None:
        """Carry out an order, now or soon."""

    def collect(self) -> tuple[BuiltStep, ...]:
        """What was carried out since the last call.

        Raises:
            BaseException: whatever the cache raised for an order.
        """

    def wait_idle(self, timeout_s: float) -> None:
        """Block until every order is carried out.

        Raises:
            TimeoutError: names the steps left.
        """

    def close(self) -> None:
        """End helper threads."""


class InlineBuilder:
    """Carries out each order inside `submit`."""

    def __init__(self, cache: StageCache, counter: StepCounter) -> None:
        self._cache = cache
        self._counter = counter
        self._built: list[BuiltStep] = []

    def submit(self, order: BuildOrder) -> None:
        self._built.append(_carry_out(self._cache, self._counter, order))

    def collect(self) -> tuple[BuiltStep, ...]:
        built, self._built = tuple(self._built), []
        return built

    def wait_idle(self, timeout_s: float) -> None:
        return None

    def close(self) -> None:
        return None


class ThreadedBuilder:
    """Carries out orders one by one on a thread of its own."""

    def __init__(self, cache: StageCache, counter: StepCounter, runtime: Runtime) -> None:
        self._cache = cache
        self._counter = counter
        self._lock = runtime.lock("sim.output_builder")
        self._changed = runtime.condition(self._lock, "sim.output_builder.changed")
        self._orders: deque[BuildOrder] = deque()
        self._current: BuildOrder | None = None
        self._built: list[BuiltStep] = []
        self._error: BaseException | None = None
        self._closed = False
        self._thread = runtime.spawn("sim-output-builder", self._run)

    def submit(self, order: BuildOrder) -> None:
        with self._lock:
            self._orders.append(order)
            self._changed.notify_all()

    def collect(self) -> tuple[BuiltStep, ...]:
        with self._lock:
            if self._error is not None:
                raise self._error
            built, self._built = tuple(self._built), []
        return built

    def wait_idle(self, timeout_s: float) -> None:
        with self._lock:
            if not self._changed.wait_for(self._is_idle, timeout_s):
                left = [order.step.step_id for order in (self._current, *self._orders) if order is not None]
                raise TimeoutError(f"output builder did not finish steps {left} within {timeout_s} s")

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(10.0)

    def _is_idle(self) -> bool:
        return self._error is not None or (not self._orders and self._current is None)

    def _run(self) -> None:
        while True:
            with self._lock:
                self._current = None
                self._changed.notify_all()
                self._changed.wait_for(lambda: bool(self._orders) or self._closed, None)
                if not self._orders:
                    return
                self._current = self._orders.popleft()
                order = self._current
            try:
                built = _carry_out(self._cache, self._counter, order)
            except BaseException as error:
                with self._lock:
                    self._error = error
                    self._changed.notify_all()
                return
            with self._lock:
                self._built.append(built)


def _carry_out(cache: StageCache, counter: StepCounter, order: BuildOrder) -> BuiltStep:
    announced_before = counter.announced
    outputs: StageCacheOutputs | None = None
    if order.req_ids is None:
        cache.discard_step(order.step.step_id, order.step.sampled_counts)
    else:
        outputs = cache.materialize(order.step.step_id, order.req_ids, order.step.sampled_counts)
    return BuiltStep(order, outputs, announced_before, counter.announcing)
