# SPDX-License-Identifier: Apache-2.0
"""Steps that were saved and not yet consumed, and what each keeps until then."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import count

import numpy as np
import numpy.typing as npt

from omni_core.prefix_cache.delivery import BatchRun
from omni_core.prefix_cache.errors import (
    DraftCountError,
    DraftCountMissingError,
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
    promised_before: npt.NDArray[np.int64] | None = None
    """`(num_reqs,)`: rows at the start of each run that an earlier step promised; `None`: none of any."""
    num_draft_tokens: npt.NDArray[np.int64] | None = None
    """`(num_reqs,)`: rows at the end of each run that were computed for drafts; `None`: none of any."""
    num_valid_rows: npt.NDArray[np.int64] | None = None
    """`(num_reqs,)`: rows at the start of each run that are of accepted tokens; `None`: not told yet."""

    @property
    def label(self) -> str:
        """The step in words, for errors."""
        return f"step {self.step_id}"

    @property
    def holder(self) -> str:
        """The name under which the step holds its staging slot."""
        return self.label

    def runs(self, req_ids: tuple[str, ...]) -> list[BatchRun]:
        """The batch rows the step delivers for these requests, in batch order. No lock needed.

        Rows that an earlier step promised and rows of rejected drafts are left out; of drafts nobody has counted yet,
        all are.
        """
        firsts, lasts, positions = self.starts[:-1], self.starts[1:], self.positions[self.starts[:-1]]
        if self.promised_before is not None or self.num_draft_tokens is not None:
            firsts, lasts, positions = self._trim(firsts, lasts, positions)
        every = zip(count(), self.req_ids, firsts.tolist(), lasts.tolist(), positions.tolist())
        if req_ids == self.req_ids:
            return list(map(BatchRun._make, every))
        wanted = set(req_ids)
        return [BatchRun._make(run) for run in every if run[1] in wanted]

    def delivers_all_it_computed(self, req_ids: tuple[str, ...]) -> bool:
        """Whether each row the step computed is delivered, to these requests, and nothing beside them."""
        return (
            req_ids == self.req_ids
            and not self.reads
            and not self.record.leftovers
            and self.promised_before is None
            and self.num_draft_tokens is None
        )

    def _trim(
        self, firsts: npt.NDArray[np.int64], lasts: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        if self.num_draft_tokens is not None:
            certain = lasts - firsts - self.num_draft_tokens
            lasts = firsts + (certain if self.num_valid_rows is None else self.num_valid_rows)
        if self.promised_before is not None:
            before = np.minimum(self.promised_before, lasts - firsts)
            firsts, positions = firsts + before, positions + before
        return firsts, lasts, positions

    def count_valid_rows(self, sampled_counts: Mapping[str, int] | None) -> npt.NDArray[np.int64] | None:
        """Rows of each run that are of accepted tokens; `None` if no request of the step has drafts. Changes nothing.

        Raises:
            DraftCountMissingError: a request with drafts has no count.
            DraftCountError: a count lies outside its run.
        """
        if self.num_draft_tokens is None:
            return None
        valid: npt.NDArray[np.int64] = self.starts[1:] - self.starts[:-1]
        for index in np.flatnonzero(self.num_draft_tokens).tolist():
            req_id, rows = self.req_ids[index], int(valid[index])
            if sampled_counts is None or req_id not in sampled_counts:
                raise DraftCountMissingError(
                    f"{self.label}: request {req_id!r} has {self.num_draft_tokens[index]} draft tokens, and "
                    "sampled_counts does not say how many of its rows are valid; give len(sampled_token_ids) for every "
                    "request of the step that has drafts"
                )
            sampled, drafts = sampled_counts[req_id], int(self.num_draft_tokens[index])
            # None sampled would leave the last known token's row neither delivered nor owed.
            if not 1 <= sampled <= 1 + drafts:
                raise DraftCountError(
                    f"{self.label}: sampled_counts says {sampled} for request {req_id!r}, whose run has {rows} rows, "
                    f"{drafts} of them for drafts: between 1 and {1 + drafts} tokens are sampled after it"
                )
            # Sampling begins after the last known token: the rows before it are valid whatever was accepted.
            valid[index] = rows - drafts - 1 + sampled
        return valid

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
        if req_ids == self.req_ids:
            return
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
            f"step {step_id} was already materialized (or discarded very long ago); a step id is consumed exactly once"
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

    def with_request(self, req_id: str) -> list[StepContext]:
        """The open steps that have rows of a request, oldest first."""
        return [context for context in self._open.values() if req_id in context.req_ids]

    def labels(self) -> list[str]:
        """The open steps in words, oldest first."""
        return [context.label for context in self._open.values()]
