# SPDX-License-Identifier: Apache-2.0
"""The thread that gathers stored rows into output buffers while the forward runs, in step order."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt
import torch

from omni_core.backend import DeviceBackend
from omni_core.prefix_cache.block_pool import PrefixBlockPool
from omni_core.prefix_cache.buffers import HostBufferPool
from omni_core.prefix_cache.committer import Committer
from omni_core.prefix_cache.errors import JoinTimeoutError, OmniPrefixCacheError
from omni_core.prefix_cache.reads import GatherBatch, StepRead
from omni_core.prefix_cache.slot_table import SlotTable
from omni_core.prefix_cache.state import CacheState
from omni_core.runtime import Runtime


class Prefetcher:
    """Serves gather batches first in, first out. `enqueue` and `drop_queue` need the state lock held."""

    def __init__(
        self,
        state: CacheState,
        table: SlotTable,
        pool: PrefixBlockPool,
        buffers: HostBufferPool,
        committer: Committer,
        backend: DeviceBackend,
        runtime: Runtime,
        join_timeout_s: float,
    ) -> None:
        self._state = state
        self._table = table
        self._pool = pool
        self._buffers = buffers
        self._committer = committer
        self._backend = backend
        self._runtime = runtime
        self._join_timeout_s = join_timeout_s
        self._queue: deque[GatherBatch] = deque()
        self.rows_gathered = 0
        self._thread = runtime.spawn("omni-core-prefetch", self._run)

    def enqueue(self, batch: GatherBatch) -> None:
        """Queue a batch; its read is complete only when it has been served."""
        batch.read.pending_batches += 1
        self._queue.append(batch)
        self._state.prefetch_work.notify_all()

    def drop_queue(self) -> None:
        """Forget all batches (`reset`); their reads have ended."""
        self._queue.clear()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end after `state.closing` was set. No lock held."""
        return self._thread.join(timeout_s)

    def _run(self) -> None:
        bound = False
        while True:
            with self._state.lock:
                self._state.prefetch_work.wait_for(lambda: bool(self._queue) or self._state.closing, None)
                if self._state.closing:
                    return
                batch = self._queue.popleft()
                if batch.read.ended:
                    continue
                batch.read.in_gather = True
            error: BaseException | None = None
            try:
                if not bound:
                    self._backend.bind_thread()
                    bound = True
                self._serve(batch)
            except BaseException as cause:  # the thread must outlive any failure; the read carries it
                error = cause
            self._finish(batch, error)

    def _serve(self, batch: GatherBatch) -> None:
        read = batch.read
        with self._state.lock:
            landed = self._state.wait(
                lambda: read.ended or self._committer.have_landed(batch.newest_id, batch.newest_record_id),
                self._join_timeout_s,
            )
            if not landed:
                stuck = ", ".join(map(str, self._committer.open_tasks)) or "none"
                raise JoinTimeoutError(
                    f"read of {read.step_label}: write {batch.newest_id} and deferred record {batch.newest_record_id} "
                    f"did not both land within join_timeout_s={self._join_timeout_s}; writes under way: {stuck}"
                )
            if read.ended or not self._state.usable:
                return
        self._runtime.checkpoint("prefetch.landed")
        for key, entries, ids in batch.parts:
            buffer = read.buffers.get(key)
            spec = self._pool.spec(key)
            if buffer is None:
                buffer = self._buffers.lease((read.buffer_num_rows, spec.row_words), spec.word)
                with self._state.lock:
                    read.buffers[key] = buffer
            self._runtime.checkpoint("prefetch.leased")
            rows = buffer.view((read.buffer_num_rows, spec.row_words), spec.word)
            self._gather(read, key, entries, rows)
            self._runtime.checkpoint("prefetch.gathered")
            if not self._settle(read, key, entries, ids, rows):
                return

    def _gather(self, read: StepRead, key: str, entries: npt.NDArray[np.int64], rows: torch.Tensor) -> None:
        """Gather request by request, so that whole blocks are moved whole."""
        for span in read.spans.values():
            first, last = np.searchsorted(entries, (span.entries.start, span.entries.stop))
            wanted = entries[first:last]
            if len(wanted) == 0:
                continue
            if len(wanted) == span.num_rows:
                self._pool.gather(key, read.slots[span.entries], rows[span.buffer_rows])
            else:
                at = wanted - span.entries.start + span.buffer_start
                for start, stop in _runs(at):
                    chosen = wanted[start:stop]
                    self._pool.gather(key, read.slots[chosen], rows[int(at[start]) : int(at[stop - 1]) + 1])
            self.rows_gathered += len(wanted)

    def _settle(
        self,
        read: StepRead,
        key: str,
        entries: npt.NDArray[np.int64],
        ids: npt.NDArray[np.int64],
        rows: torch.Tensor,
    ) -> bool:
        """Take each gathered row only if it is the one planned; take set-aside rows instead where there are any."""
        table = read.keys[key]

        def still_planned() -> npt.NDArray[np.int64]:
            planned: npt.NDArray[np.int64] = entries[(table.ids[entries] == ids) & ~table.resolved[entries]]
            return planned

        with self._state.lock:
            settled = self._state.wait(
                lambda: read.ended or not table.rescue_pending(still_planned()), self._join_timeout_s
            )
            if not settled:
                raise JoinTimeoutError(
                    f"read of {read.step_label}, key {key!r}: rows to be set aside did not come within "
                    f"join_timeout_s={self._join_timeout_s}"
                )
            if read.ended or not self._state.usable:
                return False
            planned = still_planned()
            aside = table.published(planned)
            aside_ids = table.ids[aside]
            gathered = table.not_published(planned)
            self._check_stamps(read, key, gathered)
            table.resolved[gathered] = True
            sides = tuple(table.side_rows) if len(aside) else ()
        for side in sides:
            wanted = np.isin(side.entries, aside, assume_unique=True)
            target = torch.from_numpy(read.buffer_row_of(side.entries[wanted]))
            rows.index_copy_(0, target, side.rows[torch.from_numpy(wanted)])
        with self._state.lock:
            table.resolved[aside[table.ids[aside] == aside_ids]] = True
        return True

    def _check_stamps(self, read: StepRead, key: str, entries: npt.NDArray[np.int64]) -> None:
        stamps = self._table.stamps(key, read.slots[entries])
        planned = read.keys[key].ids[entries]
        wrong = np.flatnonzero(stamps != planned)
        if len(wrong):
            raise OmniPrefixCacheError(
                f"read of {read.step_label}, key {key!r}, slot {read.slots[entries[wrong[0]]]}: planned write "
                f"{planned[wrong[0]]}, found {stamps[wrong[0]]}; an internal error, please report it"
            )

    def _finish(self, batch: GatherBatch, error: BaseException | None) -> None:
        read = batch.read
        with self._state.lock:
            read.in_gather = False
            read.pending_batches -= 1
            if error is not None and read.error is None:
                read.error = error
            abandoned = read.take_buffers() + read.side_buffers() if read.ended else []
            self._state.progress.notify_all()
        self._buffers.give_back(abandoned)


def _runs(values: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Index ranges of `values` in which they are consecutive."""
    breaks = (np.flatnonzero(np.diff(values) != 1) + 1).tolist()
    return list(zip([0, *breaks], [*breaks, len(values)], strict=True))
