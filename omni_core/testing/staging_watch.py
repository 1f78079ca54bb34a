# SPDX-License-Identifier: Apache-2.0
"""Which steps' rows lie in which bytes of pinned memory, who still needs them, and who reuses them too early."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from omni_core.backend.observer import ByteRange
from omni_core.testing.hazards import Hazard, HazardKind, HazardSide
from omni_core.testing.os_threads import ThreadLocal
from omni_core.testing.watched_runtime import WatchedThread


@dataclass(slots=True, eq=False)
class StepPage:
    """The pinned bytes one step's rows cross through."""

    stored: bool
    """Whether the writer thread has to bring rows of it into the pool."""
    step_id: int | None = None
    """`None` until `save_outputs` returns."""
    ranges: list[ByteRange] = field(default_factory=list)
    consumer: WatchedThread | None = None
    """The thread inside `materialize` or `discard_step`."""
    consumed: bool = False
    read_by_writer: bool = False
    reused: HazardSide | None = None
    """Who reused it while its consumer was still inside its call."""

    @property
    def label(self) -> str:
        """The step, in words."""
        return "the step being saved" if self.step_id is None else f"step {self.step_id}"

    def overlapping(self, memory: ByteRange) -> ByteRange | None:
        """The first of its ranges that shares a byte with `memory`."""
        return next((each for each in self.ranges if each.overlaps(memory)), None)


class _ThisThread(ThreadLocal):
    saving: StepPage | None = None


class StagingWatch:
    """Relates steps to pinned bytes. Its owner sees to it that one thread is in here at a time.

    Args:
        found: told of each hazard.
        writer_thread: name of the thread that brings rows from the pages into the pool.
    """

    def __init__(self, found: Callable[[Hazard], None], writer_thread: str) -> None:
        self._found = found
        self._writer_thread = writer_thread
        self._pages: list[StepPage] = []
        self._mine = _ThisThread()

    # -- steps

    def save_begins(self, *, stored: bool) -> None:
        """The calling thread saves a step; what it moves into pinned memory from now on is the step's page."""
        self._mine.saving = StepPage(stored)

    def save_ended(self, step_id: int | None) -> None:
        """The step has its id; `None`: it was not saved, and nobody needs its page."""
        page, self._mine.saving = self._mine.saving, None
        if page is None:
            return
        page.step_id = step_id
        if step_id is None:
            self._drop(page)

    def consume_begins(self, step_id: int, thread: WatchedThread) -> None:
        """A thread materialises or discards a step."""
        for page in self._pages:
            if page.step_id == step_id and page.consumer is None:
                page.consumer = thread

    def consume_ended(self, step_id: int, thread: WatchedThread) -> None:
        """The call is over; the step's rows are read no more."""
        for page in tuple(self._pages):
            if page.step_id == step_id and page.consumer is thread:
                page.consumed = True
                self._drop_if_done(page)

    def forget_all(self) -> None:
        """The cache was reset: every step is gone."""
        self._pages.clear()

    # -- bytes

    def written(self, memory: ByteRange, acting: HazardSide) -> None:
        """The calling thread writes into pinned memory, or queues a copy that will."""
        saving = self._mine.saving
        for page in tuple(self._pages):
            if page is not saving:
                self._reuse(page, memory, acting)
        if saving is None:
            return
        if saving not in self._pages:
            self._pages.append(saving)
        saving.ranges.append(memory)

    def read(self, memory: ByteRange, thread: WatchedThread, acting: HazardSide) -> None:
        """A thread reads."""
        for page in reversed(self._pages):
            if page.overlapping(memory) is None:
                continue
            if page.reused is not None and page.consumer is thread:
                self._found(Hazard(HazardKind.STAGING_REUSED, acting, page.reused))
                page.reused = None
            if thread.name == self._writer_thread and not page.read_by_writer:
                page.read_by_writer = True
                self._drop_if_done(page)
                return

    def _reuse(self, page: StepPage, memory: ByteRange, acting: HazardSide) -> None:
        mine = page.overlapping(memory)
        if mine is None:
            return
        if not page.consumed and page.consumer is None:
            self._blame(acting, f"{page.label} lies there and is neither materialised nor discarded", mine)
        elif page.stored and not page.read_by_writer:
            self._blame(acting, f"{page.label} lies there and its rows are not in the pool", mine)
        elif not page.consumed:
            # Its consumer may have read everything it needs: its next read will tell.
            page.reused = HazardSide(acting.thread, f"{acting.doing}, over {page.label}", memory)
            return
        self._drop(page)

    def _blame(self, acting: HazardSide, state: str, memory: ByteRange) -> None:
        self._found(Hazard(HazardKind.STAGING_REUSED, acting, HazardSide("staging", state, memory)))

    def _drop_if_done(self, page: StepPage) -> None:
        if page.consumed and (page.read_by_writer or not page.stored or page.reused is not None):
            self._drop(page)

    def _drop(self, page: StepPage) -> None:
        if page in self._pages:
            self._pages.remove(page)
