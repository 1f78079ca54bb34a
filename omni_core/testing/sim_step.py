# SPDX-License-Identifier: Apache-2.0
"""One step of the simulated engine: what goes wrong in it, what its forward computed, what was saved, who follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from omni_core.testing.engine_schedule import LostForward, ScheduledRun, SimSchedule
from omni_core.testing.fake_model import FakeOutputs


@dataclass(frozen=True, slots=True)
class StepFaults:
    """What goes wrong in one step."""

    abort_before_forward: frozenset[str] = frozenset()
    """Requests aborted after the step was scheduled: their blocks are hashed, their rows never computed."""
    lost_forward: LostForward | None = None
    """Given: the forward never runs, so the step is started and never saved; says what becomes of its requests."""
    new_weights: tuple[int | None, ...] = ()
    """Adapters that change, or `None` for the weights, once the step is announced: whether its forward ran with the old
    ones, nobody can tell."""


NO_FAULTS = StepFaults()


@dataclass(frozen=True, slots=True)
class Forward:
    """One forward that ran: what it computed, in batch order, before anything was saved."""

    number: int
    """The schedule's number."""
    runs: tuple[ScheduledRun, ...]
    outputs: FakeOutputs


@dataclass(frozen=True, slots=True)
class SavedStep:
    """One step that was saved and waits to be materialised or discarded."""

    number: int
    """The schedule's number."""
    step_id: int
    runs: tuple[ScheduledRun, ...]
    """Batch order."""
    emitted: frozenset[str]
    """Further keys the step brought."""
    num_tokens_padded: int
    leftovers: Mapping[str, Mapping[str, Any]]
    """Per request: what it must get of the values that have no row per token."""
    sampled_counts: Mapping[str, int] = field(default_factory=dict)
    """Per request with drafts: how many tokens were sampled; all but the last of them were its drafts."""

    @property
    def req_ids(self) -> tuple[str, ...]:
        """The step's requests, in batch order."""
        return tuple(run.req_id for run in self.runs)

    def valid_stop(self, run: ScheduledRun) -> int:
        """After the last position of the run whose row is not of a rejected draft."""
        return run.known_stop - 1 + self.sampled_counts[run.req_id] if run.drafts else run.stop


class StepObserver(Protocol):
    """Follows the engine. Called on the engine thread, in this order."""

    def step_started(self, schedule: SimSchedule) -> None:
        """The cache was told of the step."""

    def forward_ran(self, forward: Forward) -> None:
        """The model ran; its output buffers are valid during this call."""

    def step_saved(self, step: SavedStep) -> None:
        """The cache has taken the step's outputs."""

    def weights_changed(self, adapter_id: int | None) -> None:
        """The weights, or an adapter's, are other ones than those of every forward of a step announced so far."""


@dataclass(slots=True)
class StepCounter:
    """How far the engine is, for whoever works beside it. Written by the engine thread, read by any."""

    announcing: int = -1
    """Number of the latest schedule the cache is being told of, or was."""
    announced: int = -1
    """Number of the latest schedule the cache was told of."""
