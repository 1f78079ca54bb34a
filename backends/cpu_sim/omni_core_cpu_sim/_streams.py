# SPDX-License-Identifier: Apache-2.0
"""Streams with real asynchrony: one worker thread per stream, one queue of work, events as positions in it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

import torch

from omni_core.backend.base import Event, Stream
from omni_core.backend.errors import BackendError, DeviceCopyError, DeviceWaitTimeoutError
from omni_core.backend.observer import ObservedCopy
from omni_core.runtime import Runtime
from omni_core_cpu_sim._copier import Copier
from omni_core_cpu_sim._events import CompletedEvent, StreamEvent


class _Work(ABC):
    """One item of a stream's queue."""

    @abstractmethod
    def run(self) -> None:
        """Do it, on the stream's worker. Must not raise."""

    @abstractmethod
    def uses(self, storage_address: int) -> bool:
        """Whether the item reads or writes the storage at that address."""


class _Wait(_Work):
    def __init__(self, event: StreamEvent) -> None:
        self._event = event

    def run(self) -> None:
        self._event.wait_on_worker()

    def uses(self, storage_address: int) -> bool:
        return False


class _Copy(_Work):
    __slots__ = ("_copier", "_event", "_next_record", "_observed", "_stream_name", "_tensors")

    def __init__(
        self,
        copier: Copier,
        stream_name: str,
        event: StreamEvent,
        next_record: StreamEvent,
        destination: torch.Tensor,
        source: torch.Tensor,
        observed: ObservedCopy | None,
    ) -> None:
        self._copier = copier
        self._stream_name = stream_name
        self._observed = observed
        self._event = event
        self._next_record = next_record
        self._tensors: tuple[torch.Tensor, torch.Tensor] | None = (destination, source)

    def run(self) -> None:
        if self._tensors is None:
            return
        failure: Exception | None = None
        try:
            self._copier.copy(*self._tensors, self._observed)
        except Exception as error:
            failure = error
            # A traceback would keep the tensors of its frames alive as long as the event.
            error.__traceback__ = None
            destination = self._tensors[0]
            message = (
                f"copy of {destination.numel() * destination.element_size()} bytes to host on stream "
                f"{self._stream_name!r} failed: {type(error).__name__}: {error}"
            )
            self._event.fail(message, error)
            self._next_record.fail(message, error)
            del destination
        self._copier.tell_ended(self._observed, failure)
        # Large sources are freed here, not under the stream's lock.
        self._tensors = None

    def uses(self, storage_address: int) -> bool:
        tensors = self._tensors
        return tensors is not None and any(t.untyped_storage().data_ptr() == storage_address for t in tensors)


class WorkerStream(Stream):
    """A queue of work with one worker thread. Every method may be called from any thread.

    Args:
        name: for diagnostics.
        runtime: makes the worker, the lock and the waits.
        copier: makes the copies.
        close_timeout_s: how long `close` waits for the queued work.
        on_closed: called once, when the worker has ended.
        immediate_copy_bytes: a copy of at most so many bytes is made by the thread that queues it, if nothing is queued
            before it and copies cost nothing.
    """

    def __init__(
        self,
        name: str,
        runtime: Runtime,
        copier: Copier,
        close_timeout_s: float,
        on_closed: Callable[[WorkerStream], None],
        *,
        immediate_copy_bytes: int = 0,
    ) -> None:
        self._name = name
        self._runtime = runtime
        self._copier = copier
        self._close_timeout_s = close_timeout_s
        self._on_closed = on_closed
        self._immediate_copy_bytes = immediate_copy_bytes
        self._copies_queued = 0
        self._lock = runtime.lock(f"cpu_sim.stream.{name}")
        self._arrived = runtime.condition(self._lock, f"cpu_sim.stream.{name}.arrived")
        self._progressed = runtime.condition(self._lock, f"cpu_sim.stream.{name}.progressed")
        self._queue: deque[_Work] = deque()
        self._running: _Work | None = None
        self._queued_count = 0
        self._passed_count = 0
        self._closing = False
        self._next_record = StreamEvent(self, 0)
        self._worker = runtime.spawn(f"cpu_sim-{name}", self._work)

    @property
    def name(self) -> str:
        return self._name

    def record(self) -> Event:
        """Mark the work queued so far. Never blocks.

        The event reports a failure of any copy queued on this stream since the last `record`.
        """
        with self._lock:
            self._refuse_if_closing("record")
            event = self._next_record
            event.move_to(self._queued_count)
            self._next_record = StreamEvent(self, 0)
            self._copier.tell_recorded(event)
        return event

    def wait(self, event: Event) -> None:
        if isinstance(event, CompletedEvent):
            return
        if not isinstance(event, StreamEvent):
            raise TypeError(f"stream {self._name!r} of cpu_sim cannot wait for a {type(event).__name__}")
        self._copier.tell_waited(event, self._name)
        with self._lock:
            self._refuse_if_closing("wait")
            self._append(_Wait(event))

    def queue_copy(self, destination: torch.Tensor, source: torch.Tensor) -> Event:
        """Queue one checked copy; both tensors stay referenced until it is done. Never blocks."""
        small = destination.nbytes <= self._immediate_copy_bytes
        with self._lock:
            self._refuse_if_closing("copy_to_host")
            if small and self._queued_count == self._passed_count and self._copier.costs_nothing:
                # Waking the worker takes longer than moving so few bytes, and it would want the interpreter's lock.
                with torch.inference_mode():
                    destination.copy_(source)
                self._copies_queued += 1
                self._queued_count += 1
                self._passed_count += 1
                return StreamEvent(self, self._queued_count)
            event = StreamEvent(self, self._queued_count + 1)
            observed = self._copier.tell_queued(self._copies_queued, self._name, destination, source)
            self._copies_queued += 1
            self._copier.tell_recorded(event)
            self._append(_Copy(self._copier, self._name, event, self._next_record, destination, source, observed))
        return event

    def close(self) -> None:
        """Run what is queued, then end the worker. Idempotent.

        Raises:
            DeviceWaitTimeoutError: the queued work has not run within the backend's `close_timeout_s`. The stream takes
                no more work; call again to wait again.
        """
        self.begin_close()
        self.finish_close(self._close_timeout_s)

    def begin_close(self) -> None:
        """Take no more work; the worker ends when the queue is empty."""
        with self._lock:
            self._closing = True
            self._arrived.notify_all()

    def finish_close(self, timeout_s: float) -> None:
        """Wait for the worker to end.

        Raises:
            DeviceWaitTimeoutError: it has not within `timeout_s`.
        """
        if not self._worker.join(timeout_s):
            raise DeviceWaitTimeoutError(
                f"stream {self._name!r}: queued work has not run within close_timeout_s={self._close_timeout_s}; "
                f"{self._backlog()}"
            )
        self._on_closed(self)

    def uses(self, storage_address: int) -> bool:
        """Whether queued or running work reads or writes the storage at that address."""
        with self._lock:
            running = self._running
            return (running is not None and running.uses(storage_address)) or any(
                work.uses(storage_address) for work in self._queue
            )

    def has_passed(self, ticket: int) -> bool:
        """Whether the first `ticket` items are done. Never blocks, takes no lock: the count only grows."""
        return self._passed_count >= ticket

    def wait_for_host(self, ticket: int, timeout_s: float) -> None:
        """Block a caller's thread until the first `ticket` items are done.

        Raises:
            DeviceWaitTimeoutError: `timeout_s` passed first.
        """
        if self._passed_count >= ticket:
            return
        with self._lock:
            if self._progressed.wait_for(lambda: self._passed_count >= ticket, timeout_s):
                return
        raise DeviceWaitTimeoutError(
            f"event {ticket} of stream {self._name!r}: not complete within timeout_s={timeout_s}; {self._backlog()}"
        )

    def wait_for_worker(self, ticket: int) -> None:
        """Block a worker until the first `ticket` items are done. Events are older than their waiters: it ends."""
        with self._lock:
            self._progressed.wait_for(lambda: self._passed_count >= ticket, None)

    def tell_queried(self, event: Event) -> None:
        """A thread asks whether an event of this stream is complete."""
        self._copier.tell_queried(event)

    def tell_waited(self, event: Event) -> None:
        """A thread is about to wait for an event of this stream."""
        self._copier.tell_waited(event)

    def _append(self, work: _Work) -> None:
        self._queue.append(work)
        self._queued_count += 1
        self._arrived.notify_all()

    def _refuse_if_closing(self, call: str) -> None:
        if self._closing:
            raise BackendError(f"{call}: stream {self._name!r} of cpu_sim is closed; make a new one with new_stream")

    def _has_work_or_closes(self) -> bool:
        return bool(self._queue) or self._closing

    def _backlog(self) -> str:
        left = self._queued_count - self._passed_count
        held = "; copies are held by backend.copy_gate, release them" if self._copier.held else ""
        return f"{left} of {self._queued_count} queued items are not done{held}"

    def _work(self) -> None:
        # Destinations may be views that a caller in inference mode carved; only inference mode may write those.
        with torch.inference_mode():
            while True:
                with self._lock:
                    if self._running is not None:
                        self._running = None
                        self._passed_count += 1
                        self._progressed.notify_all()
                    self._arrived.wait_for(self._has_work_or_closes, None)
                    if not self._queue:
                        return
                    work = self._running = self._queue.popleft()
                work.run()
                del work


class CallerStream(Stream):
    """The calling thread as a stream: on a CPU its work is done when the call returns.

    Args:
        wait_timeout_s: how long `wait` blocks at most.
    """

    def __init__(self, wait_timeout_s: float) -> None:
        self._wait_timeout_s = wait_timeout_s
        self._completed = CompletedEvent()

    @property
    def name(self) -> str:
        return "caller"

    def record(self) -> Event:
        return self._completed

    def wait(self, event: Event) -> None:
        """Block until `event` is complete. The thread is the stream, so here the caller itself must wait.

        Raises:
            DeviceWaitTimeoutError: the event is not complete within the backend's `close_timeout_s`.
        """
        if not isinstance(event, CompletedEvent | StreamEvent):
            raise TypeError(f"stream {self.name!r} of cpu_sim cannot wait for a {type(event).__name__}")
        try:
            event.synchronize(self._wait_timeout_s)
        except DeviceCopyError:
            return

    def close(self) -> None:
        return None
