# SPDX-License-Identifier: Apache-2.0
"""Streams with real asynchrony: one worker thread per stream, one queue of work, events as positions in it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch

from omni_core.backend.base import Event, Stream
from omni_core.backend.errors import BackendError, DeviceCopyError, DeviceWaitTimeoutError
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


class CompletedEvent(Event):
    """The event of a stream whose work is done when it is queued."""

    def query(self) -> bool:
        return True

    def synchronize(self, timeout_s: float) -> None:
        return None


class StreamEvent(Event):
    """A position in one stream's queue; complete when the worker has passed it."""

    __slots__ = ("_failure", "_failure_cause", "_stream", "_ticket")

    def __init__(self, stream: WorkerStream, ticket: int) -> None:
        self._stream = stream
        self._ticket = ticket
        self._failure: str | None = None
        self._failure_cause: Exception | None = None

    def move_to(self, ticket: int) -> None:
        """Set the number of work items the event comes after. Before anyone else has the event."""
        self._ticket = ticket

    def fail(self, message: str, cause: Exception) -> None:
        """Keep the first failure of the work before the event. Worker only, before the event completes."""
        if self._failure is None:
            self._failure = message
            self._failure_cause = cause

    def query(self) -> bool:
        if not self._stream.has_passed(self._ticket):
            return False
        self._raise_failure()
        return True

    def synchronize(self, timeout_s: float) -> None:
        self._stream.wait_for_host(self._ticket, timeout_s)
        self._raise_failure()

    def wait_on_worker(self) -> None:
        """Block a stream's worker until the event is complete. A failure orders like success."""
        self._stream.wait_for_worker(self._ticket)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise DeviceCopyError(self._failure) from self._failure_cause


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
    __slots__ = ("_event", "_next_record", "_stream", "_tensors")

    def __init__(
        self,
        stream: WorkerStream,
        event: StreamEvent,
        next_record: StreamEvent,
        destination: torch.Tensor,
        source: torch.Tensor,
    ) -> None:
        self._stream = stream
        self._event = event
        self._next_record = next_record
        self._tensors: tuple[torch.Tensor, torch.Tensor] | None = (destination, source)

    def run(self) -> None:
        if self._tensors is None:
            return
        try:
            self._stream.copy_now(*self._tensors)
        except Exception as error:
            # A traceback would keep the tensors of its frames alive as long as the event.
            error.__traceback__ = None
            destination = self._tensors[0]
            message = (
                f"copy of {destination.numel() * destination.element_size()} bytes to host on stream "
                f"{self._stream.name!r} failed: {type(error).__name__}: {error}"
            )
            self._event.fail(message, error)
            self._next_record.fail(message, error)
            del destination
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
        gate: what every copy passes first.
        cost: what a copy costs.
        close_timeout_s: how long `close` waits for the queued work.
        on_closed: called once, when the worker has ended.
    """

    def __init__(
        self,
        name: str,
        runtime: Runtime,
        gate: CopyGate,
        cost: CopyCost,
        close_timeout_s: float,
        on_closed: Callable[[WorkerStream], None],
    ) -> None:
        self._name = name
        self._runtime = runtime
        self._gate = gate
        self._cost = cost
        self._close_timeout_s = close_timeout_s
        self._on_closed = on_closed
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
        return event

    def wait(self, event: Event) -> None:
        if isinstance(event, CompletedEvent):
            return
        if not isinstance(event, StreamEvent):
            raise TypeError(f"stream {self._name!r} of cpu_sim cannot wait for a {type(event).__name__}")
        with self._lock:
            self._refuse_if_closing("wait")
            self._append(_Wait(event))

    def queue_copy(self, destination: torch.Tensor, source: torch.Tensor) -> Event:
        """Queue one checked copy; both tensors stay referenced until it is done. Never blocks."""
        with self._lock:
            self._refuse_if_closing("copy_to_host")
            event = StreamEvent(self, self._queued_count + 1)
            self._append(_Copy(self, event, self._next_record, destination, source))
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

    def copy_now(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Make one copy at its simulated cost. Worker only."""
        failure = self._gate.admit()
        if failure is not None:
            raise failure
        cost = self._cost
        if cost.latency_s:
            self._runtime.sleep(cost.latency_s)
        if cost.parts == 1:
            self._copy_part(destination, source)
            return
        flat_destination = destination.view(-1)
        flat_source = source.view(-1)
        count = flat_source.numel()
        bounds = [count * part // cost.parts for part in range(cost.parts + 1)]
        for start, end in pairwise(bounds):
            self._copy_part(flat_destination[start:end], flat_source[start:end])

    def _copy_part(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        # Time passes before the bytes move: whoever reads without waiting finds the old ones.
        seconds = self._cost.seconds_for(source.numel() * source.element_size())
        if seconds:
            self._runtime.sleep(seconds)
        self._runtime.checkpoint("cpu_sim.copy.before_part")
        destination.copy_(source)
        self._runtime.checkpoint("cpu_sim.copy.after_part")

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
        held = "; copies are held by backend.copy_gate, release them" if self._gate.held else ""
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
