# SPDX-License-Identifier: Apache-2.0
"""Steps that were saved and not yet consumed, and what each keeps until then."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import count

import numpy as np
import numpy.typing as npt

from omni_core.prefix_cache.delivery import BatchRun
from omni_core.prefix_cache.errors import (
    RequestError,
    RequestNotInStepError,
    StepAlreadyDiscardedError,
    StepAlreadyMaterializedError,
    UnknownStepError,
)
from omni_core.prefix_cache.reads import StepRead
from omni_core.prefix_cache.slot_table import Slots
from omni_core.prefix_cache.staging import StagingSlot
from omni_core.prefix_cache.step_record import StepRecord
from omni_core.prefix_cache.task import WriteTask

_REMEMBERED_STEPS = 4096
"""Consumed steps whose end is remembered, so that a second use can be told what became of them."""


class StepEnd(Enum):
    """How a step was consumed."""

    MATERIALIZED = "materialized"
    DISCARDED = "discarded"


@dataclass(slots=True)
class StepContext:
    """One saved step."""

    step_id: int
    req_ids: tuple[str, ...]
    serials: npt.NDArray[np.int64]
    """Which life of its id each request is in; ids may be used again before the step is consumed."""
    starts: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    slots: Slots
    record: StepRecord
    staging_slot: StagingSlot
    task: WriteTask
    reads: list[StepRead]
    owed_read: StepRead | None = None
    """Of `reads`, the one that carries rows of earlier, undelivered steps."""
    failed: dict[str, RequestError] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The step in words, for errors."""
        return f"step {self.step_id}"

    @property
    def holder(self) -> str:
        """The name under which the step holds its staging slot."""
        return self.label

    def runs(self, req_ids: tuple[str, ...]) -> list[BatchRun]:
        """The batch rows of these requests, in batch order. No lock needed."""
        bounds = self.starts.tolist()
        firsts = self.positions[self.starts[:-1]].tolist()
        every = zip(count(), self.req_ids, bounds, bounds[1:], firsts)
        if req_ids == self.req_ids:
            return list(map(BatchRun._make, every))
        wanted = set(req_ids)
        return [BatchRun._make(run) for run in every if run[1] in wanted]

    def read_of(self, req_id: str) -> StepRead | None:
        """The read that gathers stored rows for a request."""
        for read in self.reads:
            if req_id in read.spans:
                return read
        return None

    def reads_of(self, req_ids: Sequence[str]) -> dict[str, StepRead]:
        """The same for several requests; those without stored rows are left out."""
        if not self.reads:
            return {}
        return {req_id: read for req_id in req_ids if (read := self.read_of(req_id)) is not None}

    def check_requests(self, req_ids: tuple[str, ...]) -> None:
        """Refuse requests that are not part of the step.

        Raises:
            RequestNotInStepError: names the request and those the step has.
        """
        known = set(self.req_ids)
        for req_id in req_ids:
            if req_id not in known:
                shown = ", ".join(map(repr, self.req_ids[:8])) + (", …" if len(self.req_ids) > 8 else "")
                raise RequestNotInStepError(
                    f"request {req_id!r} is not in {self.label}; it has {len(self.req_ids)}: {shown}"
                )


class OpenSteps:
    """Hands out step ids, each consumed exactly once. Every method needs the state lock."""

    def __init__(self) -> None:
        self._next_id = 1
        self._open: dict[int, StepContext] = {}
        self._discarded: deque[int] = deque(maxlen=_REMEMBERED_STEPS)

    def __len__(self) -> int:
        return len(self._open)

    def next_id(self) -> int:
        """Give out the next step id."""
        self._next_id += 1
        return self._next_id - 1

    def add(self, context: StepContext) -> None:
        """The step is saved."""
        self._open[context.step_id] = context

    def get(self, step_id: int) -> StepContext:
        """An open step.

        Raises:
            UnknownStepError: the id was never given out.
            StepAlreadyMaterializedError: it was materialized before.
            StepAlreadyDiscardedError: it was discarded before.
        """
        context = self._open.get(step_id)
        if context is not None:
            return context
        if not 0 < step_id < self._next_id:
            raise UnknownStepError(
                f"step {step_id} was never saved; ids given out so far: 1 to {self._next_id - 1}"
                if self._next_id > 1
                else f"step {step_id} was never saved; no step was saved so far"
            )
        if step_id in self._discarded:
            raise StepAlreadyDiscardedError(f"step {step_id} was already discarded; a step id is consumed exactly once")
        raise StepAlreadyMaterializedError(
            f"step {step_id} was already materialized; a step id is consumed exactly once"
        )

    def consume(self, step_id: int, end: StepEnd) -> StepContext:
        """Take an open step out. Raises as `get`."""
        context = self.get(step_id)
        del self._open[step_id]
        if end is StepEnd.DISCARDED:
            self._discarded.append(step_id)
        return context

    def consume_all(self) -> list[StepContext]:
        """Take every open step out, as discarded (`reset`)."""
        contexts = list(self._open.values())
        self._discarded.extend(self._open)
        self._open.clear()
        return contexts

    def labels(self) -> list[str]:
        """The open steps in words, oldest first."""
        return [context.label for context in self._open.values()]
