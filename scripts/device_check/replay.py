# SPDX-License-Identifier: Apache-2.0
"""Runs recorded steps through the real cache at full speed: engine thread here, a builder thread that materialises.

Nothing waits for the device but what the cache itself waits for; rows are judged when the run is over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from types import TracebackType
from typing import Protocol, Self

import numpy as np
import torch

from device_check.judge import DeliveredRows, Judge, Judgement
from device_check.step_graphs import StepGraphs, producer_stream
from device_check.traffic import CODES_KEY, Traffic
from omni_core.backend import DeviceBackend
from omni_core.prefix_cache.config import HIDDEN_KEY, PrefixCacheConfig
from omni_core.prefix_cache.manager import OmniPrefixCacheManager
from omni_core.prefix_cache.outputs import StageCacheOutputs
from omni_core.prefix_cache.policy import ModelCachePolicy
from omni_core.runtime import Runtime, ThreadingRuntime

_BUILDER_TIMEOUT_S = 120.0


class Disturbance(Protocol):
    """Does something beside the steps, to move them against each other in time."""

    def before_forward(self, number: int) -> None:
        """Engine thread, before the forward of step `number`."""

    def after_save(self, number: int) -> None:
        """Engine thread, once step `number` was saved."""

    def before_materialize(self, number: int) -> None:
        """Builder thread."""


class Undisturbed:
    """Does nothing."""

    def before_forward(self, number: int) -> None:
        """See `Disturbance`."""

    def after_save(self, number: int) -> None:
        """See `Disturbance`."""

    def before_materialize(self, number: int) -> None:
        """See `Disturbance`."""


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """One run."""

    num_steps: int
    num_tokens: int
    padded_steps: int
    """Steps that ran at more rows than they had tokens."""
    eager_steps: int
    """Steps larger than every graph."""
    seconds: float
    """Of the steps, the judging left out."""
    judgement: Judgement


def replay(
    traffic: Traffic,
    make_backend: Callable[[Runtime], DeviceBackend],
    make_graphs: Callable[[torch.device], StepGraphs],
    make_disturbance: Callable[[torch.device], Disturbance],
) -> ReplayReport:
    """Run and judge. Blocks until both are done.

    Raises:
        OmniPrefixCacheError: the cache raised, on either thread.
        TimeoutError: the builder thread does not end.
    """
    runtime = ThreadingRuntime()
    backend = make_backend(runtime)
    try:
        backend.bind_thread()
        device = torch.device(backend.device_info().device)
        with producer_stream(device):
            graphs, disturbance = make_graphs(device), make_disturbance(device)
            graphs.prepare(traffic.steps)
            with CachedSteps(traffic, backend, runtime, device, graphs, disturbance) as steps:
                started_s = runtime.monotonic_s()
                rows = [steps.run(number) for number in range(len(traffic.steps))]
                delivered = steps.finish()
                seconds = runtime.monotonic_s() - started_s
    finally:
        backend.close()
    judge = Judge(traffic)
    for number, step in enumerate(traffic.steps):
        judge.check(number, step, delivered[number])
    tokens = [step.num_tokens for step in traffic.steps]
    return ReplayReport(
        num_steps=len(tokens),
        num_tokens=sum(tokens),
        padded_steps=sum(padded > real for padded, real in zip(rows, tokens, strict=True)),
        eager_steps=sum(real > traffic.config.capture_sizes[-1] for real in tokens),
        seconds=seconds,
        judgement=judge.finish(),
    )


class CachedSteps:
    """The engine's side of a cache: steps of a traffic, one by one. Engine thread; a context manager that closes it."""

    def __init__(
        self,
        traffic: Traffic,
        backend: DeviceBackend,
        runtime: Runtime,
        device: torch.device,
        graphs: StepGraphs,
        disturbance: Disturbance,
    ) -> None:
        config = traffic.config
        self._traffic = traffic
        self._graphs = graphs
        self._disturbance = disturbance
        self._layout = traffic.steps[0].layout
        self._cache = OmniPrefixCacheManager(
            PrefixCacheConfig(
                num_blocks=config.num_blocks,
                block_size=config.block_size,
                hidden_size=config.hidden_size,
                hidden_dtype=config.hidden_dtype,
                max_num_tokens=config.max_num_tokens,
            ),
            backend,
            lambda: self._layout,
            runtime=runtime,
            device=device,
        )
        self._cache.register_policy(ModelCachePolicy(token_keys=frozenset({CODES_KEY})))
        self._builder = _Builder(self._cache, backend, runtime, disturbance)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cache.close()

    def run(self, number: int) -> int:
        """One engine step; the number of rows its forward gave."""
        step = self._traffic.steps[number]
        self._layout = step.layout
        self._cache.new_step_starts(step.events)
        self._disturbance.before_forward(number)
        outputs = self._graphs.run(number)
        step_id = self._cache.save_outputs(
            outputs.rows[HIDDEN_KEY],
            {CODES_KEY: outputs.rows[CODES_KEY]},
            num_tokens_unpadded=step.num_tokens,
            num_tokens_padded=outputs.num_tokens_padded,
        )
        self._builder.submit(number, step_id, step.layout.req_ids)
        self._disturbance.after_save(number)
        return outputs.num_tokens_padded

    def finish(self) -> list[dict[str, DeliveredRows]]:
        """What was delivered, by step, when all is."""
        return self._builder.finish()


@dataclass(frozen=True, slots=True)
class _Order:
    number: int
    step_id: int
    req_ids: tuple[str, ...]


class _Builder:
    """A thread that materialises each step and copies its rows out."""

    def __init__(
        self, cache: OmniPrefixCacheManager, backend: DeviceBackend, runtime: Runtime, disturbance: Disturbance
    ) -> None:
        self._cache = cache
        self._backend = backend
        self._disturbance = disturbance
        self._orders: SimpleQueue[_Order | None] = SimpleQueue()
        self._delivered: list[dict[str, DeliveredRows]] = []
        self._failures: list[BaseException] = []
        self._thread = runtime.spawn("device-check-builder", self._work)

    def submit(self, number: int, step_id: int, req_ids: tuple[str, ...]) -> None:
        """Have a step materialised.

        Raises:
            BaseException: what an earlier one raised.
        """
        if self._failures:
            raise self._failures[0]
        self._orders.put(_Order(number, step_id, req_ids))

    def finish(self) -> list[dict[str, DeliveredRows]]:
        """What was delivered, by step."""
        self._orders.put(None)
        if not self._thread.join(_BUILDER_TIMEOUT_S):
            raise TimeoutError(f"the builder thread did not end within {_BUILDER_TIMEOUT_S:g} s")
        if self._failures:
            raise self._failures[0]
        return self._delivered

    def _work(self) -> None:
        try:
            self._backend.bind_thread()
            while (order := self._orders.get()) is not None:
                self._disturbance.before_materialize(order.number)
                outputs = self._cache.materialize(order.step_id, order.req_ids)
                for error in outputs.failed.values():
                    raise error
                self._delivered.append(_copied(outputs))
                outputs.release()
        except BaseException as error:  # carried to the engine thread, whatever it is
            self._failures.append(error)


def _copied(outputs: StageCacheOutputs) -> dict[str, DeliveredRows]:
    """The rows, copied: released buffers are used again."""
    copied = {}
    for req_id, request in outputs.items():
        ranges = [np.arange(start, stop, dtype=np.int64) for start, stop in request.ranges]
        positions = np.concatenate(ranges) if ranges else np.empty(0, np.int64)
        copied[req_id] = DeliveredRows(positions, {key: rows.clone() for key, rows in request.rows.items()})
    return copied
