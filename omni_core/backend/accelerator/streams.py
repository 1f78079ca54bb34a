# SPDX-License-Identifier: Apache-2.0
"""Native streams: the producer's, which are only looked at, and the cache's own, which copies run on."""

from __future__ import annotations

from contextlib import suppress

from omni_core.backend.accelerator.device import AcceleratorDevice
from omni_core.backend.accelerator.device_module import NativeEvent, NativeStream
from omni_core.backend.accelerator.events import AcceleratorEvent
from omni_core.backend.accelerator.in_flight import CopiesInFlight, CopyParts, MemoryUse
from omni_core.backend.base import Event, Stream
from omni_core.backend.errors import BackendError, DeviceCopyError, DeviceWaitTimeoutError
from omni_core.runtime import Runtime

STREAMS_PER_POOL = 32
"""How many streams a device has for torch, on NPU (backend-facts A1) as on CUDA (c10/cuda/CUDAStream.cpp): the vendor's
`Stream()` hands them out in turn, so the 33rd is the first again."""


class NativeStreams:
    """Native streams that are used again when they are free, so that the vendor's pool is never gone through.

    Any bound thread.
    """

    def __init__(self, runtime: Runtime, device: AcceleratorDevice) -> None:
        self._lock = runtime.lock("accelerator.streams")
        self._device = device
        self._free: list[NativeStream] = []
        self._num_taken = 0

    def take(self, name: str) -> NativeStream:
        """A stream nobody else of this backend has.

        Raises:
            BackendError: all there are are in use.
        """
        with self._lock:
            if self._free:
                return self._free.pop()
            if self._num_taken == STREAMS_PER_POOL:
                raise BackendError(
                    f"new_stream({name!r}): {STREAMS_PER_POOL} streams are open, and the device has no more; another "
                    "would be one of them under a second name. Close streams that are no longer used"
                )
            self._num_taken += 1
        return self._device.new_stream()

    def give_back(self, native: NativeStream) -> None:
        """The stream's work has run."""
        with self._lock:
            self._free.append(native)


class AcceleratorStream(Stream):
    """A native stream. Every method may be called from any bound thread."""

    def __init__(self, name: str, native: NativeStream, device: AcceleratorDevice, runtime: Runtime) -> None:
        self._name = name
        self._native = native
        self._device = device
        self._runtime = runtime

    @property
    def name(self) -> str:
        return self._name

    @property
    def native(self) -> NativeStream:
        """The vendor's stream."""
        return self._native

    def record(self) -> AcceleratorEvent:
        """Mark the work queued so far. Never blocks: on NPU the mark is only put into the host task queue.

        Raises:
            DeviceCopyError: the device takes no more work; an earlier failure.
        """
        # A native event of its own for each: one used again would still be waited for under its old meaning by whoever
        # kept it, and whether NPU's queued waits take the old mark or the new one is not documented.
        native: NativeEvent = self._device.new_event()
        try:
            native.record(self._native)
        except Exception as error:
            raise DeviceCopyError(
                f"no event could be recorded on stream {self._name!r}: {type(error).__name__}: {error}"
            ) from error
        return AcceleratorEvent(native, self._name, self._runtime)

    def wait(self, event: Event) -> None:
        """Order all later work of this stream after `event`. Never blocks the caller.

        Raises:
            TypeError: the event is of another backend. A native stream would accept it and wait for nothing
                (backend-facts A4.1).
            DeviceCopyError: the device takes no more work; an earlier failure.
        """
        if not isinstance(event, AcceleratorEvent) or not isinstance(event.native, self._device.event_class):
            raise TypeError(f"stream {self._name!r} cannot wait for a {type(event).__name__} of another backend")
        if event.known_complete:
            return
        try:
            self._native.wait_event(event.native)
        except Exception as error:
            raise DeviceCopyError(
                f"stream {self._name!r} cannot wait for an event: {type(error).__name__}: {error}"
            ) from error


class ProducerStream(AcceleratorStream):
    """A stream that others put work on. Closing it does nothing; it is theirs."""

    def close(self) -> None:
        return None


class CopyStream(AcceleratorStream):
    """A stream of the cache's own.

    Args:
        name: for diagnostics.
        streams: where the native stream comes from, and goes to.
        device: the device.
        runtime: makes locks and waits.
        close_timeout_s: how long `close` waits for the queued work.
    """

    def __init__(
        self, name: str, streams: NativeStreams, device: AcceleratorDevice, runtime: Runtime, close_timeout_s: float
    ) -> None:
        super().__init__(name, streams.take(name), device, runtime)
        self._streams = streams
        self._close_timeout_s = close_timeout_s
        self._copies = CopiesInFlight(runtime, name)
        self._closing = False
        self._last: AcceleratorEvent | None = None
        self._closed = False

    def record(self) -> AcceleratorEvent:
        """As `AcceleratorStream.record`.

        Raises:
            BackendError: the stream is closed.
        """
        self._refuse_if_closing("record")
        return super().record()

    def wait(self, event: Event) -> None:
        """As `AcceleratorStream.wait`.

        Raises:
            BackendError: the stream is closed.
        """
        self._refuse_if_closing("wait")
        super().wait(event)

    def queue_copy(self, parts: CopyParts, producer: AcceleratorStream) -> Event:
        """Queue one checked copy behind the work of `producer`, the calling thread's stream. Never blocks.

        All tensors stay referenced until the copy is known to have ended.

        Raises:
            DeviceCopyError: the device takes no more work; an earlier failure. What the copy uses is kept for ever if
                it may have been queued all the same.
            BackendError: the stream is closed.
        """
        self._refuse_if_closing("copy_to_host")
        self._copies.settle()
        self.wait(producer.record())
        copy = self._copies.begin(parts)
        try:
            self._device.copy(parts, self._native, producer.native)
            copy.done = super().record()
        except BaseException as error:
            self._copies.lose(copy)
            if isinstance(error, DeviceCopyError) or not isinstance(error, Exception):
                raise
            raise DeviceCopyError(
                f"copy of {sum(source.nbytes for _, source in parts)} bytes to host on stream {self._name!r} "
                f"could not be queued: {type(error).__name__}: {error}"
            ) from error
        return copy.done

    def use_of(self, storage_address: int) -> MemoryUse:
        """What copies of this stream do with the storage at that address now. Never blocks."""
        self._copies.settle()
        return self._copies.use_of(storage_address)

    @property
    def is_over(self) -> bool:
        """Whether it is closed, and nothing of it is left."""
        return self._closed and not self._copies.num_lost

    def close(self) -> None:
        """Wait for the queued work, then keep the native stream for the next `new_stream`. Idempotent.

        Raises:
            DeviceWaitTimeoutError: the queued work has not run within the backend's `close_timeout_s`. The stream takes
                no more work; call again to wait again.
        """
        self.close_within(self._close_timeout_s)

    def close_within(self, timeout_s: float) -> None:
        """`close`, waiting for at most `timeout_s`."""
        if self._closed:
            return
        self._closing = True
        # A device that failed runs nothing any more: its copies are lost, and there is nothing to wait for.
        with suppress(DeviceCopyError):
            self._await_queued(timeout_s)
        self._copies.settle()
        self._closed = True
        if not self._copies.num_lost:
            self._streams.give_back(self._native)

    def _await_queued(self, timeout_s: float) -> None:
        if self._last is None:
            self._last = super().record()
        try:
            self._last.synchronize(timeout_s)
        except DeviceWaitTimeoutError as error:
            raise DeviceWaitTimeoutError(
                f"stream {self._name!r}: queued work has not run within close_timeout_s={self._close_timeout_s}"
            ) from error

    def _refuse_if_closing(self, call: str) -> None:
        if self._closing:
            raise BackendError(f"{call}: stream {self._name!r} is closed; make a new one with new_stream")
