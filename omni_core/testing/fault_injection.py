# SPDX-License-Identifier: Apache-2.0
"""Makes the faults of a plan happen, through what the cache is given: its runtime, its backend and its caller."""

from __future__ import annotations

import mmap
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from omni_core.backend.base import Event
from omni_core.backend.observer import DeviceObserver, ObservedCopy
from omni_core.prefix_cache.events import StepEvents
from omni_core.prefix_cache.outputs import PartialRequest, StageCacheOutputs
from omni_core.runtime import Runtime
from omni_core.testing.fault_plan import COMMITTER, ENGINE, Fault, FaultKind, FaultPlan
from omni_core.testing.memory_accesses import AccessWatch, TorchAccess
from omni_core.testing.os_threads import ThreadLocal
from omni_core.testing.stage_cache import StageCache
from omni_core.testing.watched_runtime import WatchedRuntime, WatchedThread

_ALLOCATIONS = ("aten::empty", "aten::zeros", "aten::full", "aten::new_", "aten::clone", "aten::cat")


class InjectedFault:
    """Mixed into every exception a plan raises, to tell it from others."""


class InjectedCopyError(InjectedFault, RuntimeError):
    """A copy that a plan lets fail."""


class InjectedMemoryError(InjectedFault, MemoryError):
    """Memory that a plan refuses."""


class InjectedOperationError(InjectedFault, RuntimeError):
    """A torch operation that a plan lets fail."""


class InjectedSinkError(InjectedFault, OSError):
    """A sink that a plan lets fail."""


class InjectedDeath(InjectedFault, BaseException):
    """What a plan kills a thread with: nothing that `except Exception` stops."""


class _ThisThread(ThreadLocal):
    calls = 0
    """How many calls of the cache the thread is inside of."""


class FaultInjector(DeviceObserver):
    """One run's faults. Build the cache with `runtime`, the backend with this as its observer, call it through `wrap`.

    Args:
        plan: the faults.
        runtime: the runtime underneath.
        seed: decides how long reordered copies take.
    """

    def __init__(self, plan: FaultPlan, runtime: Runtime, seed: int = 0) -> None:
        self.plan = plan
        self.injected: list[Fault] = []
        """Faults that happened, in order."""
        self.armed = True
        """Set to `False`, nothing goes wrong any more."""
        self.live_arenas = 0
        """Pinned arenas made and not closed."""
        self.runtime = WatchedRuntime(runtime, self, lambda: AccessWatch(self))
        self._rng = random.Random(f"injector {seed}")
        self._seen: Counter[object] = Counter()
        self._mine = _ThisThread()

    def wrap(self, cache: StageCache) -> StageCache:
        """The cache to call: late or failing where the plan says so."""
        return _FaultyCache(cache, self)

    @contextmanager
    def on_engine_thread(self) -> Iterator[None]:
        """Operations of the calling thread are the engine's until the block ends."""
        self.runtime.adopt(ENGINE)
        with AccessWatch(self):
            yield

    # -- what the backend and the threads tell

    def thread_bound(self) -> None:
        if self._is_committer and self._comes(FaultKind.BIND_DIES):
            raise InjectedDeath("bind_thread")

    def arena_wanted(self, nbytes: int) -> None:
        if self._comes(FaultKind.ARENA_REFUSED):
            raise InjectedMemoryError(f"pinned arena of {nbytes} bytes")

    def ring_wanted(self, nbytes: int) -> None:
        if self._comes(FaultKind.ARENA_REFUSED):
            raise InjectedMemoryError(f"device memory of {nbytes} bytes")

    def arena_made(self, memory: object) -> None:
        self.live_arenas += 1

    def arena_closed(self, memory: object) -> None:
        self.live_arenas -= 1

    def copy_begins(self, copy: ObservedCopy) -> None:
        slow = self._comes(FaultKind.COPY_SLOW)
        if slow is not None:
            self.runtime.sleep(slow.seconds)
        for fault in self.plan.of(FaultKind.COPIES_REORDERED) if self.armed else ():
            self._note(fault)
            self.runtime.sleep(self._rng.random() * fault.seconds)
        if self._comes(FaultKind.COPY_FAILS):
            raise InjectedCopyError(str(copy))

    def event_waited(self, event: Event, waiter: str) -> None:
        if self._is_committer and self._comes(FaultKind.WAIT_DIES):
            raise InjectedDeath("waiting for a copy")

    def torch_runs(self, access: TorchAccess) -> None:
        """A watched thread is about to run a torch operation; counted inside the cache only."""
        name = self.runtime.this_thread.name
        if self._mine.calls == 0 and not name.startswith("omni-core"):
            return
        if self._comes(FaultKind.OPERATION_FAILS, name):
            raise InjectedOperationError(access.operation)
        if access.operation.startswith(_ALLOCATIONS) and self._comes(FaultKind.ALLOCATION_FAILS, name):
            raise InjectedMemoryError(access.operation)

    def may_wait(self, thread: WatchedThread, what: str) -> None:
        """Waits are of no interest."""

    # -- what the caller tells

    @contextmanager
    def inside_call(self) -> Iterator[None]:
        """The calling thread is inside a call of the cache."""
        self._mine.calls += 1
        try:
            yield
        finally:
            self._mine.calls -= 1

    @contextmanager
    def reserving(self) -> Iterator[None]:
        """Inside the block, address space that the calling thread reserves may be refused."""
        reserve = mmap.mmap

        def refuse_or_reserve(*args: Any, **kwargs: Any) -> mmap.mmap:
            if self._comes(FaultKind.POOL_REFUSED):
                raise InjectedMemoryError(f"address space: {args}")
            return reserve(*args, **kwargs)

        if not self.plan.of(FaultKind.POOL_REFUSED):
            yield
            return
        # The pool asks the operating system, which takes no wishes; a call of the engine thread is all this covers.
        with patch.object(mmap, "mmap", refuse_or_reserve):
            yield

    def delay_build(self) -> None:
        """A step is about to be materialised or discarded."""
        late = self._comes(FaultKind.BUILDER_LATE)
        if late is not None:
            self.runtime.sleep(late.seconds)

    def give_to_sink(self, outputs: StageCacheOutputs) -> None:
        """Outputs have come."""
        if self._comes(FaultKind.SINK_FAILS):
            raise InjectedSinkError(f"outputs of step {outputs.step_id}")

    @property
    def _is_committer(self) -> bool:
        return self.runtime.this_thread.name == COMMITTER

    def _comes(self, kind: FaultKind, thread: str = "") -> Fault | None:
        """Count an occurrence; the fault that falls on it, if one does."""
        number = self._seen[kind, thread]
        self._seen[kind, thread] = number + 1
        for fault in self.plan.of(kind) if self.armed else ():
            if fault.number == number and fault.thread == thread:
                self._note(fault)
                return fault
        return None

    def _note(self, fault: Fault) -> None:
        if fault not in self.injected:
            self.injected.append(fault)


class _FaultyCache:
    def __init__(self, inner: StageCache, injector: FaultInjector) -> None:
        self._inner = inner
        self._injector = injector

    def new_step_starts(self, events: StepEvents) -> None:
        with self._injector.inside_call():
            self._inner.new_step_starts(events)

    def save_outputs(
        self,
        hidden: torch.Tensor | None,
        mm_outputs: Mapping[str, Any],
        *,
        num_tokens_unpadded: int,
        num_tokens_padded: int,
    ) -> int:
        with self._injector.inside_call(), self._injector.reserving():
            return self._inner.save_outputs(
                hidden, mm_outputs, num_tokens_unpadded=num_tokens_unpadded, num_tokens_padded=num_tokens_padded
            )

    def materialize(
        self, step_id: int, req_ids: Sequence[str], sampled_counts: Mapping[str, int] | None = None
    ) -> StageCacheOutputs:
        self._injector.delay_build()
        with self._injector.inside_call():
            outputs = self._inner.materialize(step_id, req_ids, sampled_counts)
        self._injector.give_to_sink(outputs)
        return outputs

    def discard_step(self, step_id: int, sampled_counts: Mapping[str, int] | None = None) -> None:
        self._injector.delay_build()
        with self._injector.inside_call():
            self._inner.discard_step(step_id, sampled_counts)

    def take_partial_requests(self) -> tuple[PartialRequest, ...]:
        return self._inner.take_partial_requests()

    def bump_weight_version(self) -> object:
        return self._inner.bump_weight_version()

    def bump_adapter_version(self, adapter_id: int) -> object:
        return self._inner.bump_adapter_version(adapter_id)
