# SPDX-License-Identifier: Apache-2.0
"""Makes the simulated copies: what they cost, in how many parts they move, and who is told."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from omni_core.backend.base import Event
from omni_core.backend.observer import ByteRange, DeviceObserver, ObservedCopy
from omni_core.runtime import Runtime
from omni_core_cpu_sim._gate import CopyGate


@dataclass(frozen=True, slots=True)
class CopyCost:
    """What a simulated copy costs, in time of the runtime's clock."""

    latency_s: float
    """Seconds before the first byte moves."""
    bandwidth_bytes_per_s: float
    """0: bytes cost no time."""
    parts: int
    """Pieces a copy is made in; the destination is half written between them."""

    def seconds_for(self, nbytes: int) -> float:
        """Seconds that `nbytes` cost beyond the latency."""
        return nbytes / self.bandwidth_bytes_per_s if self.bandwidth_bytes_per_s else 0.0


class Copier:
    """Moves the bytes of one backend's copies, on the workers of its streams.

    Args:
        runtime: simulated costs pass on its clock.
        gate: what every copy passes first.
        cost: what a copy costs.
        observer: told of every copy.
    """

    def __init__(self, runtime: Runtime, gate: CopyGate, cost: CopyCost, observer: DeviceObserver | None) -> None:
        self._runtime = runtime
        self._gate = gate
        self._cost = cost
        self._observer = observer
        self._is_plain = observer is None and cost == CopyCost(0.0, 0.0, 1)

    @property
    def held(self) -> bool:
        """Whether copies are held back now."""
        return self._gate.held

    @property
    def costs_nothing(self) -> bool:
        """Whether a copy queued now is nothing but its bytes: no cost, gate, failure or observer."""
        return self._is_plain and self._gate.open

    def tell_queued(
        self, number: int, stream: str, destination: torch.Tensor, source: torch.Tensor
    ) -> ObservedCopy | None:
        """Tell the observer of copy `number` of a stream; `None` if there is no observer."""
        if self._observer is None:
            return None
        copy = ObservedCopy(number, stream, ByteRange.of(source), ByteRange.of(destination))
        self._observer.copy_queued(copy)
        return copy

    def tell_recorded(self, event: Event) -> None:
        """Tell the observer of a recorded event."""
        if self._observer is not None:
            self._observer.event_recorded(event)

    def tell_queried(self, event: Event) -> None:
        """Tell the observer that a thread asks after an event."""
        if self._observer is not None:
            self._observer.event_queried(event)

    def tell_waited(self, event: Event, waiter: str = "") -> None:
        """Tell the observer that an event is waited for; `waiter` names the stream that will wait."""
        if self._observer is not None:
            self._observer.event_waited(event, waiter)

    def tell_ended(self, copy: ObservedCopy | None, failure: Exception | None) -> None:
        """Tell the observer that a copy is over."""
        if self._observer is not None and copy is not None:
            self._observer.copy_ended(copy, failure)

    def copy(self, destination: torch.Tensor, source: torch.Tensor, observed: ObservedCopy | None) -> None:
        """Make one copy at its simulated cost. Worker of a stream only."""
        if self._observer is not None and observed is not None:
            self._observer.copy_begins(observed)
        failure = self._gate.admit()
        if failure is not None:
            raise failure
        cost = self._cost
        if cost.latency_s:
            self._runtime.sleep(cost.latency_s)
        flat_destination = destination.view(-1)
        flat_source = source.view(-1)
        count = flat_source.numel()
        bounds = [count * part // cost.parts for part in range(cost.parts + 1)]
        for start, end in pairwise(bounds):
            # Time passes before the bytes move: whoever reads without waiting finds the old ones.
            seconds = cost.seconds_for((end - start) * source.element_size())
            if seconds:
                self._runtime.sleep(seconds)
            self._runtime.checkpoint("cpu_sim.copy.before_part")
            flat_destination[start:end].copy_(flat_source[start:end])
            if self._observer is not None and observed is not None:
                self._observer.part_moved(observed, end * source.element_size())
            self._runtime.checkpoint("cpu_sim.copy.after_part")
