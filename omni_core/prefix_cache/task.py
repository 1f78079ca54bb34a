# SPDX-License-Identifier: Apache-2.0
"""A write on its way from the device to the pool: its states, the legal moves between them, and what it carries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt
import torch

from omni_core.backend import Event
from omni_core.prefix_cache.block_pool import RowSpec
from omni_core.prefix_cache.device_ring import RingTicket
from omni_core.prefix_cache.staging import BounceBuffer, StagingSlot

_NO_SLOTS: npt.NDArray[np.int64] = np.zeros(0, np.int64)


class WriteSchedule(Enum):
    """When a write must have left the device."""

    JOIN_NEXT_STEP = "join_next_step"
    """At once: the rows are copied to host beside the next forward."""
    JOIN_ON_FINISH = "join_on_finish"
    """When its request ends, or earlier if someone wants the rows or their room on the device. Declared by
    `ModelCachePolicy.deferred_keys`."""


class TaskState(Enum):
    """Where a write stands, and what that means for other threads."""

    PENDING = "pending"
    """Not queued: just made, or deferred, its rows claimed and still on the device while its requests are open."""
    QUEUED = "queued"
    """On the committer's queue; its write id is claimed, its rows may not be on the host."""
    COPYING = "copying"
    """Taken by the committer, which waits for the device copy."""
    HOST_READY = "host_ready"
    """Its rows may be read on the host."""
    WRITTEN = "written"
    """The rows are in the pool and the host memory they came through is no longer the write's."""
    FAILED = "failed"
    """The rows never reached the pool; the cache's failure record says why."""


LEGAL_MOVES: dict[TaskState, frozenset[TaskState]] = {
    TaskState.PENDING: frozenset({TaskState.QUEUED, TaskState.FAILED}),
    TaskState.QUEUED: frozenset({TaskState.COPYING, TaskState.FAILED}),
    TaskState.COPYING: frozenset({TaskState.HOST_READY, TaskState.FAILED}),
    TaskState.HOST_READY: frozenset({TaskState.WRITTEN, TaskState.FAILED}),
    TaskState.WRITTEN: frozenset(),
    TaskState.FAILED: frozenset(),
}
"""What each state may be followed by. `docs/concurrency.md` is drawn from it."""


class StagedRows:
    """Rows of one key that lie in host memory, on their way to the pool."""

    __slots__ = ("_words", "key", "rows")

    def __init__(self, key: str, rows: torch.Tensor) -> None:
        """`rows` is a contiguous CPU tensor with one row per token of the step, in bytes or any dtype."""
        self.key = key
        self.rows = rows
        self._words: torch.Tensor | None = None

    def words(self, spec: RowSpec) -> torch.Tensor:
        """`(num_rows, row_words)`: the rows as the words they are moved in. Committer thread only.

        Steps of a known form bring the same object again, and a view costs a torch operation.
        """
        if self._words is None:
            self._words = self.rows.view(-1).view(spec.word).view(-1, spec.row_words)
        return self._words


@dataclass(frozen=True, slots=True)
class RecordPart:
    """Where one key's rows lie in a deferred record, in bytes from its start."""

    key: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class PoolRows:
    """Rows of one key that are copied from other slots of the pool (a KV block copy)."""

    key: str
    source_slots: npt.NDArray[np.int64]
    destination_slots: npt.NDArray[np.int64]


class _Write:
    """What has a `TaskState`. Every method is called with the cache's state lock held.

    Without a constructor: the engine makes one of these per step, and each call of it counts.
    """

    __slots__ = ("label", "state", "write_id")

    label: str
    write_id: int
    state: TaskState

    def transition(self, to: TaskState) -> None:
        """Move to the next state.

        Raises:
            RuntimeError: the move is not legal; an internal error.
        """
        if to not in LEGAL_MOVES[self.state]:
            raise RuntimeError(f"{self.label} (write {self.write_id}): illegal move {self.state.name} -> {to.name}")
        self.state = to

    @staticmethod
    def transition_all(writes: Sequence[_Write], to: TaskState) -> None:
        """Move many at once: a request that ends after a thousand steps queues as many records on the engine thread.

        Raises:
            RuntimeError: as `transition`.
        """
        for write in writes:
            if to not in LEGAL_MOVES[write.state]:
                write.transition(to)
            write.state = to

    @property
    def host_ready(self) -> bool:
        """The rows may be read on the host."""
        return self.state in (TaskState.HOST_READY, TaskState.WRITTEN)

    @property
    def done(self) -> bool:
        """Nothing more will happen to the write."""
        return self.state in (TaskState.WRITTEN, TaskState.FAILED)

    def __str__(self) -> str:
        return f"{self.label} (write {self.write_id}, {self.state.name})"


class DeferredRecord(_Write):
    """A step's deferred rows: cloned together, copied to the host together, landed together.

    Made by `record_step`; `register` gives it its place among the writes once the step is saved. Its room in the
    step's page is used if the step is still open when it is copied.
    """

    __slots__ = (
        "bounce",
        "cloned",
        "copy_done",
        "page",
        "page_start",
        "parts",
        "req_ids",
        "slots",
        "step_holder",
        "ticket",
        "write_ns",
    )

    def __init__(
        self, parts: tuple[RecordPart, ...], ticket: RingTicket, cloned: Event, page: StagingSlot, page_start: int
    ) -> None:
        """`cloned` completes when the rows are in the ticket's bytes; `page_start` is the record's first page byte."""
        self.label = "deferred rows"
        self.write_id = 0
        self.state = TaskState.PENDING
        self.parts = parts
        self.ticket = ticket
        self.cloned = cloned
        self.page = page
        self.page_start = page_start
        self.step_holder = ""
        self.slots: npt.NDArray[np.int64] = _NO_SLOTS
        self.req_ids: tuple[str, ...] = ()
        self.write_ns: npt.NDArray[np.int64] = _NO_SLOTS
        """Per request of `req_ids`, the number of its deferred write that the record belongs to."""
        self.copy_done: Event | None = None
        self.bounce: BounceBuffer | None = None
        """Where the rows are copied if not into the page."""

    def register(self, step: str, write_id: int, slots: npt.NDArray[np.int64], req_ids: tuple[str, ...]) -> None:
        """The step was saved under `write_id`, and holds its page under the name `step`.

        `slots` are flat pool slots per row, -1 where a row is not stored.
        """
        self.label = f"deferred rows of {step}"
        self.write_id = write_id
        self.step_holder = step
        self.slots = slots
        self.req_ids = req_ids

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys whose rows it holds."""
        return tuple(part.key for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes on the device, and on the host."""
        return self.ticket.nbytes


class WriteTask(_Write):
    """One write into the pool: the rows of a step's immediate keys, a block copy, or deferred records.

    The keys of a step share `slots`; the task is landed as a whole, deferred records one after the other. Every method
    is called with the cache's state lock held.
    """

    __slots__ = ("copy_done", "copy_slots", "records", "slots", "staged", "staging_slot")

    def __init__(self, label: str, write_id: int, slots: npt.NDArray[np.int64] = _NO_SLOTS) -> None:
        """`label` names the task in errors; `slots` are flat pool slots, -1 where a row is not stored."""
        self.label = label
        self.write_id = write_id
        self.state = TaskState.PENDING
        self.slots = slots
        self.staged: tuple[StagedRows, ...] = ()
        self.copy_slots: tuple[PoolRows, ...] = ()
        self.records: tuple[DeferredRecord, ...] = ()
        """Deferred records, oldest first; the write id is the last one's."""
        self.staging_slot: StagingSlot | None = None
        self.copy_done: Event | None = None
