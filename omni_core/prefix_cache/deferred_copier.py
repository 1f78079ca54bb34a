# SPDX-License-Identifier: Apache-2.0
"""Brings deferred records to the host, each in one transfer, and lands them strictly oldest first."""

from __future__ import annotations

from itertools import zip_longest

import torch

from omni_core.backend import DeviceBackend, Stream
from omni_core.prefix_cache.abandoned_copies import AbandonedCopies
from omni_core.prefix_cache.deferred_memory import DeferredMemory
from omni_core.prefix_cache.errors import JoinTimeoutError, OmniPrefixCacheError
from omni_core.prefix_cache.pool_writer import PoolWriter
from omni_core.prefix_cache.staging import BounceBuffer, StagingBufferPool
from omni_core.prefix_cache.state import CacheState
from omni_core.prefix_cache.task import DeferredRecord, StagedRows, TaskState, WriteTask
from omni_core.runtime import Runtime

DEFERRED_HOLDER = "deferred write"
"""The name under which a record's copy holds its step's staging slot."""


class DeferredCopier:
    """The committer's part of the deferred path. `land` runs on its thread; the rest needs the state lock."""

    def __init__(
        self,
        state: CacheState,
        writer: PoolWriter,
        staging: StagingBufferPool,
        abandoned: AbandonedCopies,
        backend: DeviceBackend,
        stream: Stream,
        runtime: Runtime,
        join_timeout_s: float,
    ) -> None:
        self._state = state
        self._writer = writer
        self._staging = staging
        self._abandoned = abandoned
        self._backend = backend
        self._stream = stream
        self._runtime = runtime
        self._join_timeout_s = join_timeout_s
        self._memory: DeferredMemory | None = None
        self._free_bounces: list[BounceBuffer] = []
        self.landed_upto = 0
        """Every deferred record with a write id up to this has landed."""
        self.copies_made = 0
        """Transfers begun: one per record."""

    def use(self, memory: DeferredMemory) -> None:
        """Records will come from this ring, and may pass through these bounce buffers. Before the first step."""
        self._memory = memory
        self._free_bounces = list(memory.bounces)

    def land(self, task: WriteTask) -> None:
        """Copy and land a task's records. While one is put into the pool, the next is already on its way. No lock held.

        Raises:
            DeviceCopyError, DeviceWaitTimeoutError: a copy failed, or did not end within `join_timeout_s`.
            JoinTimeoutError: copies nobody waits for kept both bounce buffers busy for longer than that.
        """
        records = task.records
        self._start(records[0])
        for record, following in zip_longest(records, records[1:]):
            if following is not None:
                self._start(following)
            self._await(record, task if following is None else None)
            self._runtime.checkpoint("committer.deferred_copied")
            host = _host_bytes(record)
            staged = [StagedRows(part.key, host[part.start : part.stop]) for part in record.parts]
            self._writer.write(record.write_id, record.slots, staged)
            with self._state.lock:
                record.transition(TaskState.WRITTEN)
                self._release_host(record)
                self.landed_upto = record.write_id
                self._state.progress.notify_all()
            self._runtime.checkpoint("committer.deferred_landed")

    def give_up(self, record: DeferredRecord) -> None:
        """The record will not land. What a running copy uses is given back when that has ended, the rest at once."""
        if record.done:
            return
        state = record.state
        record.transition(TaskState.FAILED)
        if state is TaskState.COPYING and record.copy_done is not None:
            where = f"a bounce buffer ({record.label})" if record.bounce else f"staging slot {record.page.index}"
            self._abandoned.add(where, record.copy_done, lambda: self._release_all(record))
        elif state is TaskState.HOST_READY:
            self._release_host(record)
        elif state is TaskState.COPYING:
            self._release_all(record)
        else:
            self._release_device(record)

    # -- one record ---------------------------------------------------------------------------------------------------

    def _start(self, record: DeferredRecord) -> None:
        """Begin the transfer: into the step's page while the step is open, else into a bounce buffer."""
        with self._state.lock:
            if record.step_holder in record.page.holders:
                record.page.hold(DEFERRED_HOLDER)
                record.transition(TaskState.COPYING)
                chosen = True
            else:
                chosen = self._take_bounce(record)
        if not chosen:
            self._await_bounce(record)
        self._runtime.checkpoint("committer.deferred_copying")
        # The rows were cloned on the engine's stream; nothing else orders this thread's copies behind it.
        self._stream.wait(record.cloned)
        copy_done = self._backend.copy_to_host(_host_bytes(record), self._ring_bytes(record), self._stream)
        with self._state.lock:
            record.copy_done = copy_done
            self.copies_made += 1

    def _await(self, record: DeferredRecord, ended: WriteTask | None) -> None:
        """Wait for the copy; `ended` is the record's task, if it is its last one."""
        if record.copy_done is None:
            raise OmniPrefixCacheError(f"{record.label} were waited for before their copy began; an internal error")
        record.copy_done.synchronize(self._join_timeout_s)
        with self._state.lock:
            record.transition(TaskState.HOST_READY)
            self._release_device(record)
            if ended is not None:
                ended.transition(TaskState.HOST_READY)
            self._state.progress.notify_all()

    def _take_bounce(self, record: DeferredRecord) -> bool:
        """Take a bounce buffer, if one is free, and let the copy begin."""
        if not self._free_bounces:
            return False
        record.bounce = self._free_bounces.pop()
        record.transition(TaskState.COPYING)
        return True

    def _await_bounce(self, record: DeferredRecord) -> None:
        """Both bounce buffers are only ever busy together because copies that were given up still run into them."""
        deadline_s = self._runtime.monotonic_s() + self._join_timeout_s
        while (left_s := deadline_s - self._runtime.monotonic_s()) > 0:
            self._abandoned.free(left_s)
            with self._state.lock:
                if self._take_bounce(record):
                    return
        with self._state.lock:
            places = ", ".join(self._abandoned.places)
        raise JoinTimeoutError(
            f"{record.label}: no bounce buffer became free within join_timeout_s={self._join_timeout_s}; copies whose "
            f"rows nobody wants still run into {places}"
        )

    def _ring_bytes(self, record: DeferredRecord) -> torch.Tensor:
        if self._memory is None:
            raise OmniPrefixCacheError(f"{record.label}: there is no device ring; an internal error")
        return self._memory.ring.view(record.ticket)

    # -- giving back, state lock held ---------------------------------------------------------------------------------

    def _release_all(self, record: DeferredRecord) -> None:
        self._release_device(record)
        self._release_host(record)

    def _release_device(self, record: DeferredRecord) -> None:
        if self._memory is not None:
            self._memory.ring.give_back(record.ticket)

    def _release_host(self, record: DeferredRecord) -> None:
        if record.bounce is None:
            self._staging.release(record.page, DEFERRED_HOLDER)
        else:
            self._free_bounces.append(record.bounce)
            record.bounce = None


def _host_bytes(record: DeferredRecord) -> torch.Tensor:
    """uint8 CPU tensor `(nbytes,)`: where the record's bytes come to lie on the host."""
    if record.bounce is not None:
        return record.bounce.page[: record.nbytes]
    return record.page.page[record.page_start : record.page_start + record.nbytes]
