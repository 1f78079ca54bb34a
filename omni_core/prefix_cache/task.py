# SPDX-License-Identifier: Apache-2.0
"""A write on its way from the device to the pool: its states, the legal moves between them, and what it carries."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt
import torch

from omni_core.backend import Event
from omni_core.prefix_cache.staging import StagingSlot


class WriteSchedule(Enum):
    """When a write must have left the device."""

    JOIN_NEXT_STEP = "join_next_step"
    """At once: the rows are copied to host beside the next forward."""
    JOIN_ON_FINISH = "join_on_finish"
    """When its request ends. Declared by `ModelCachePolicy.deferred_keys`; refused by this version."""


class TaskState(Enum):
    """Where a write stands, and what that means for other threads."""

    PENDING = "pending"
    """Made; no other thread knows of it."""
    QUEUED = "queued"
    """On the committer's queue; its write id is claimed, its rows may not be on the host."""
    COPYING = "copying"
    """Taken by the committer, which waits for the device copy."""
    HOST_READY = "host_ready"
    """The staging page may be read."""
    WRITTEN = "written"
    """The rows are in the pool and the staging page is no longer the task's."""
    FAILED = "failed"
    """The rows never reached the pool; the cache's failure record says why."""


_LEGAL_MOVES: dict[TaskState, frozenset[TaskState]] = {
    TaskState.PENDING: frozenset({TaskState.QUEUED, TaskState.FAILED}),
    TaskState.QUEUED: frozenset({TaskState.COPYING, TaskState.FAILED}),
    TaskState.COPYING: frozenset({TaskState.HOST_READY, TaskState.FAILED}),
    TaskState.HOST_READY: frozenset({TaskState.WRITTEN, TaskState.FAILED}),
    TaskState.WRITTEN: frozenset(),
    TaskState.FAILED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class StagedRows:
    """Rows of one key that lie in the staging page: CPU tensor `(num_rows, *trailing)`."""

    key: str
    rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class PoolRows:
    """Rows of one key that are copied from other slots of the pool (a KV block copy)."""

    key: str
    source_slots: npt.NDArray[np.int64]
    destination_slots: npt.NDArray[np.int64]


class WriteTask:
    """One write into the pool: the rows of a step's immediate keys, or a block copy.

    All keys of a task but block copies share `slots`; the task is landed as a whole. Every method is called with the
    cache's state lock held.
    """

    __slots__ = ("copy_done", "copy_slots", "label", "slots", "staged", "staging_slot", "state", "write_id")

    def __init__(self, label: str, write_id: int, slots: npt.NDArray[np.int64]) -> None:
        """`label` names the task in errors; `slots` are flat pool slots, -1 where a row is not stored."""
        self.label = label
        self.write_id = write_id
        self.slots = slots
        self.staged: tuple[StagedRows, ...] = ()
        self.copy_slots: tuple[PoolRows, ...] = ()
        self.staging_slot: StagingSlot | None = None
        self.copy_done: Event | None = None
        self.state = TaskState.PENDING

    def transition(self, to: TaskState) -> None:
        """Move to the next state.

        Raises:
            RuntimeError: the move is not legal; an internal error.
        """
        if to not in _LEGAL_MOVES[self.state]:
            raise RuntimeError(f"{self.label} (write {self.write_id}): illegal move {self.state.name} -> {to.name}")
        self.state = to

    @property
    def host_ready(self) -> bool:
        """The staging page may be read."""
        return self.state in (TaskState.HOST_READY, TaskState.WRITTEN)

    @property
    def done(self) -> bool:
        """Nothing more will happen to the task."""
        return self.state in (TaskState.WRITTEN, TaskState.FAILED)

    def __str__(self) -> str:
        return f"{self.label} (write {self.write_id}, {self.state.name})"
