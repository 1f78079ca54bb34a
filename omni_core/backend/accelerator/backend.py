# SPDX-License-Identifier: Apache-2.0
"""What backends of accelerators share: everything but where the vendor's functions are found."""

from __future__ import annotations

import atexit
import logging
import os
from abc import abstractmethod
from collections.abc import Mapping

import torch

from omni_core.backend.accelerator.device import AcceleratorDevice
from omni_core.backend.accelerator.device_module import DeviceModule
from omni_core.backend.accelerator.in_flight import MemoryUse
from omni_core.backend.accelerator.memory import AcceleratorArena, AcceleratorRing, LiveMemory
from omni_core.backend.accelerator.pinning import HostPinning
from omni_core.backend.accelerator.streams import AcceleratorStream, CopyStream, NativeStreams, ProducerStream
from omni_core.backend.base import Capabilities, DeviceBackend, DeviceInfo, Event, Stream
from omni_core.backend.copy_errors import copy_outside_arenas, strided_copy, unequal_copy
from omni_core.backend.errors import (
    BackendError,
    BackendFeatureUnsupportedError,
    BackendOptionError,
    BackendUnavailableError,
    DeviceWaitTimeoutError,
)
from omni_core.runtime import Runtime

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0
"""How long closing waits for queued work unless told otherwise."""


class AcceleratorBackend(DeviceBackend):
    """A backend over one device of a vendor's module.

    It lives until `close`: memory that a device can write to is not left to the garbage collector. A process that ends
    without closing it closes it then, before the vendor's own shutdown (faults.md, row 105).

    Args:
        runtime: makes the locks and the sleeps of waits; there are no threads.
        module: the vendor's functions.
        pinning: the vendor's way to page-lock.
        device_index: which device; `None`: the calling thread's.
        close_timeout_s: how long closing a stream, or the backend, waits for queued work.

    Raises:
        BackendOptionError: `device_index` or `close_timeout_s` is negative.
    """

    def __init__(
        self,
        runtime: Runtime,
        module: DeviceModule,
        pinning: HostPinning,
        *,
        device_index: int | None,
        close_timeout_s: float,
    ) -> None:
        super().__init__(runtime)
        if device_index is not None and device_index < 0:
            raise BackendOptionError(f"{self.name}: device_index={device_index} must be at least 0")
        if not close_timeout_s >= 0:
            raise BackendOptionError(f"{self.name}: close_timeout_s={close_timeout_s} must be at least 0")
        self._device = AcceleratorDevice(module, device_index)
        self._device.bind_thread()
        self._pinning = pinning
        self._close_timeout_s = close_timeout_s
        self._native_streams = NativeStreams(runtime, self._device)
        self._memory = LiveMemory(runtime, self._device, self._use_of)
        self._lock = runtime.lock("accelerator.backend")
        self._streams: tuple[CopyStream, ...] = ()
        self._producers: dict[int, ProducerStream] = {}
        self._closed = False
        self._released = False
        self._process = os.getpid()
        atexit.register(self._close_at_exit)

    @classmethod
    def require_available(cls) -> None:
        """Refuse a machine that cannot run the backend.

        Raises:
            BackendUnavailableError: the message is `unavailable_reason()`.
        """
        reason = cls.unavailable_reason()
        if reason is not None:
            raise BackendUnavailableError(f"backend {cls.name!r} cannot run on this machine: {reason}")

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            async_copy=True,
            pinned_memory=True,
            blocking_events=True,
            static_graph_outputs=True,
            exact_pinning=self._pinning.exact,
        )

    @abstractmethod
    def software(self) -> Mapping[str, str]:
        """Versions of what runs under torch; for `device_info`."""

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lies on the backend's device. One on another device of the kind does not."""
        device = tensor.device
        return device.type == self.device_type and device.index in (None, self._device.index)

    def device_info(self) -> DeviceInfo:
        free_bytes, total_bytes = self._device.memory_bytes()
        return DeviceInfo(
            name=self._device.name(),
            device=f"{self.device_type}:{self._device.index}",
            total_memory_bytes=total_bytes,
            free_memory_bytes=free_bytes,
            software=self.software(),
        )

    def bind_thread(self) -> None:
        self._device.bind_thread()

    def current_stream(self) -> AcceleratorStream:
        """The stream the calling thread's device work goes to. Makes nothing for a stream it has met before.

        Raises:
            BackendError: the vendor's functions were replaced before the backend was made.
        """
        native = self._device.current_stream()
        known = self._producers.get(native.stream_id)
        if known is None:
            known = ProducerStream(f"current-{native.stream_id}", native, self._device, self._runtime)
            self._producers[native.stream_id] = known
        return known

    def new_stream(self, name: str) -> CopyStream:
        """Make a stream.

        Raises:
            BackendError: the backend is closed, or as many streams are open as the device has.
        """
        self._refuse_if_closed("new_stream")
        stream = CopyStream(name, self._native_streams, self._device, self._runtime, self._close_timeout_s)
        with self._lock:
            closed_meanwhile = self._closed
            if not closed_meanwhile:
                self._streams = (*(kept for kept in self._streams if not kept.is_over), stream)
        if closed_meanwhile:
            stream.close()
            self._refuse_if_closed("new_stream")
        return stream

    def pinned_arena(self, nbytes: int, *, chunk_bytes: int = 0) -> AcceleratorArena:
        """Page-lock `nbytes` of host memory.

        Raises:
            MemoryError: the operating system or the driver refused; the message names the size. Nothing is left, and
                nothing smaller was tried.
            ValueError: `nbytes` is below 1, or `chunk_bytes` is not whole pages.
            BackendFeatureUnsupportedError: not `capabilities.exact_pinning`, and the range would need several pieces.
            BackendError: the backend is closed.
        """
        if nbytes < 1:
            raise ValueError(f"pinned_arena: nbytes={nbytes} must be at least 1")
        self._refuse_if_closed("pinned_arena")
        return self._memory.add_arena(self._pinning.pin(nbytes, chunk_bytes), chunk_bytes)

    def snapshot_ring(self, depth: int, nbytes: int, device: torch.device) -> AcceleratorRing:
        """Allocate `depth` device buffers of `nbytes` each.

        Raises:
            MemoryError: the device refused; the message names the size.
            ValueError: `depth` or `nbytes` is below 1, or `device` is not the backend's.
            BackendError: the backend is closed.
        """
        if depth < 1 or nbytes < 1:
            raise ValueError(f"snapshot_ring: depth={depth} and nbytes={nbytes} must be at least 1")
        if device.type != self.device_type or device.index not in (None, self._device.index):
            raise ValueError(f"snapshot_ring: {self._described} does not own {device}")
        self._refuse_if_closed("snapshot_ring")
        try:
            # An inference tensor could not be written outside inference mode.
            with torch.inference_mode(False):
                buffers = tuple(torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(depth))
        except RuntimeError as error:
            raise MemoryError(
                f"snapshot_ring: {self._described} refused {depth} buffers of {nbytes} bytes; lower staging_depth, "
                f"max_num_tokens or device_staging_bytes, or leave the engine less memory: {error}"
            ) from error
        return self._memory.add_ring(buffers)

    def copy_to_host(self, destination: torch.Tensor, source: torch.Tensor, stream: Stream) -> Event:
        """Queue one copy; both tensors stay referenced until it has ended. Never blocks the caller.

        Raises:
            ValueError: shapes or dtypes differ, a tensor is not contiguous, the source lies on another device, or the
                destination lies in no live arena of this backend: the vendor's copy would cast, or wait for the stream
                without a word (backend-facts A1, "non_blocking D2H"). Nothing is queued.
            BackendFeatureUnsupportedError: `stream` was not made by `new_stream`.
            DeviceCopyError: the device takes no more work; an earlier failure.
            BackendError: the stream is closed.
        """
        if destination.shape != source.shape or destination.dtype != source.dtype:
            raise unequal_copy(destination, source)
        if not destination.is_contiguous() or not source.is_contiguous():
            raise strided_copy(destination, source)
        if not self.owns(source):
            raise ValueError(f"copy_to_host: source lies on {source.device}, which {self._described} does not own")
        arena = self._memory.arena_of(destination)
        if arena is None:
            raise copy_outside_arenas(destination)
        if not isinstance(stream, CopyStream):
            raise BackendFeatureUnsupportedError(
                f"copy_to_host: stream {stream.name!r} ({type(stream).__name__}) is not the cache's own; "
                "pass a stream made by this backend's new_stream"
            )
        return stream.queue_copy(arena.parts_of(destination, source), self.current_stream())

    def close(self) -> None:
        """Wait for queued work, close streams, rings and arenas. Idempotent; bounded by `close_timeout_s`.

        Memory that a failed copy may still use is kept until the process ends, with a warning.

        Raises:
            DeviceWaitTimeoutError: queued work has not run within `close_timeout_s`; arenas and rings stay open.
        """
        if self._released:
            return
        with self._lock:
            self._closed = True
            streams = self._streams
        self._device.try_bind_thread()
        deadline_s = self._runtime.monotonic_s() + self._close_timeout_s
        stuck: list[str] = []
        for stream in streams:
            try:
                stream.close_within(max(0.0, deadline_s - self._runtime.monotonic_s()))
            except DeviceWaitTimeoutError as error:
                stuck.append(str(error))
        if stuck:
            raise DeviceWaitTimeoutError(f"{self._described} not closed: " + "; ".join(stuck))
        self._memory.close_all()
        self._released = True
        # While registered, the backend is alive, and with it the memory that must not be freed.
        if not self._memory.num_kept:
            atexit.unregister(self._close_at_exit)

    @property
    def _described(self) -> str:
        return f"backend {self.name!r} of {self.device_type}:{self._device.index}"

    def _use_of(self, storage_address: int) -> MemoryUse:
        uses = {stream.use_of(storage_address) for stream in self._streams}
        if MemoryUse.QUEUED in uses:
            return MemoryUse.QUEUED
        return MemoryUse.UNKNOWN if MemoryUse.UNKNOWN in uses else MemoryUse.NONE

    def _refuse_if_closed(self, call: str) -> None:
        if self._closed:
            raise BackendError(f"{call}: {self._described} is closed")

    def _close_at_exit(self) -> None:
        # A forked child inherits the registration, but not the device.
        if os.getpid() != self._process:
            return
        try:
            self.close()
        except Exception as error:  # nobody is left to handle it
            logger.warning("%s at the end of the process: %s", self._described, error)
