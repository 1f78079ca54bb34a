# SPDX-License-Identifier: Apache-2.0
"""The simulator as a backend: the contract of `DeviceBackend`, kept by threads and plain memory."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch

from omni_core.backend.base import Capabilities, DeviceBackend, DeviceInfo, Event, Stream
from omni_core.backend.copy_errors import copy_outside_arenas, strided_copy, unequal_copy
from omni_core.backend.errors import (
    BackendError,
    BackendFeatureUnsupportedError,
    DeviceWaitTimeoutError,
)
from omni_core.backend.observer import DeviceObserver
from omni_core.backend.pinned_pieces import PinnedPieces
from omni_core.runtime import Runtime
from omni_core_cpu_sim._copier import Copier, CopyCost
from omni_core_cpu_sim._gate import CopyGate
from omni_core_cpu_sim._graph import CaptureSizePadding
from omni_core_cpu_sim._memory import MemoryBooks, PinDriver, SimPinnedArena, SimSnapshotRing, poisoned_buffer
from omni_core_cpu_sim._options import check_integer, check_number
from omni_core_cpu_sim._streams import CallerStream, WorkerStream


class CpuSimBackend(DeviceBackend):
    """Owns CPU tensors; copies them to "pinned" host memory beside the caller, on one thread per stream.

    The engine thread is its own stream: torch's CPU work there is done when the call returns.

    Args:
        runtime: makes the threads, locks and waits; simulated costs pass on its clock.
        copy_latency_s: seconds each copy takes before its first byte moves.
        copy_bandwidth_bytes_per_s: bytes a stream copies per second; 0: bytes cost no time.
        copy_parts: pieces a copy is made in; another thread may run between two of them.
        pin_seconds_per_byte: seconds `pinned_arena` takes per byte.
        max_pinned_bytes: most bytes all live arenas may have; `None`: no limit.
        max_pin_bytes: most bytes the simulated driver page-locks at a time; `None`: no limit.
        refused_pins: numbers of the pins that it refuses, counted from 1 over the backend's life.
        report_arenas_as_pinned: `True` makes arenas and `capabilities` say what a device with pinned memory says, so
            that a caller's accounting can be tested. Nothing is page-locked either way.
        immediate_copy_bytes: copies of at most so many bytes are made by the thread that queues them, if the stream is
            idle and copies cost nothing; for serving, where a thread's wake-up costs more than they do.
        close_timeout_s: how long closing a stream, or the backend, waits for queued work.
        observer: told of every copy, event and allocation; may make them fail.

    Raises:
        BackendOptionError: an option is out of range; the message names it, its value and the rule.
    """

    name: ClassVar[str] = "cpu_sim"
    device_type: ClassVar[str] = "cpu"
    serving_options: ClassVar[Mapping[str, Any]] = {"immediate_copy_bytes": 64 << 10}

    def __init__(
        self,
        runtime: Runtime,
        *,
        copy_latency_s: float = 0.0,
        copy_bandwidth_bytes_per_s: float = 0.0,
        copy_parts: int = 1,
        pin_seconds_per_byte: float = 0.0,
        max_pinned_bytes: int | None = None,
        max_pin_bytes: int | None = None,
        refused_pins: Sequence[int] = (),
        report_arenas_as_pinned: bool = False,
        immediate_copy_bytes: int = 0,
        close_timeout_s: float = 10.0,
        observer: DeviceObserver | None = None,
    ) -> None:
        super().__init__(runtime)
        check_number("copy_latency_s", copy_latency_s)
        check_number("copy_bandwidth_bytes_per_s", copy_bandwidth_bytes_per_s)
        check_integer("copy_parts", copy_parts, at_least=1)
        check_number("pin_seconds_per_byte", pin_seconds_per_byte)
        if max_pinned_bytes is not None:
            check_integer("max_pinned_bytes", max_pinned_bytes, at_least=0)
        if max_pin_bytes is not None:
            check_integer("max_pin_bytes", max_pin_bytes, at_least=1)
        for number in refused_pins:
            check_integer("refused_pins", number, at_least=1)
        check_integer("immediate_copy_bytes", immediate_copy_bytes, at_least=0)
        check_number("close_timeout_s", close_timeout_s)
        self._pins = PinDriver(runtime, pin_seconds_per_byte, max_pin_bytes, refused_pins)
        self._max_pinned_bytes = max_pinned_bytes
        self._report_arenas_as_pinned = report_arenas_as_pinned
        self._immediate_copy_bytes = immediate_copy_bytes
        self._close_timeout_s = close_timeout_s
        self._observer = observer
        self._gate = CopyGate(runtime)
        cost = CopyCost(copy_latency_s, copy_bandwidth_bytes_per_s, copy_parts)
        self._copier = Copier(runtime, self._gate, cost, observer)
        self._books = MemoryBooks(runtime, self._name_of_stream_using, observer)
        self._caller_stream = CallerStream(close_timeout_s)
        self._lock = runtime.lock("cpu_sim.backend")
        self._streams: tuple[WorkerStream, ...] = ()
        self._closed = False

    @classmethod
    def unavailable_reason(cls) -> str | None:
        return None

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            async_copy=True,
            pinned_memory=self._report_arenas_as_pinned,
            blocking_events=True,
            static_graph_outputs=True,
        )

    @property
    def copy_gate(self) -> CopyGate:
        """Simulator controls: hold copies back, let them through, make them fail."""
        return self._gate

    @property
    def pinned_bytes(self) -> int:
        """Bytes of live arenas: what a device with pinned memory would have page-locked. 0 after `close`."""
        return self._books.pinned_bytes

    @property
    def device_bytes(self) -> int:
        """Bytes of live snapshot rings. 0 after `close`."""
        return self._books.device_bytes

    @property
    def pinned_allocations(self) -> int:
        """Arenas allocated since the backend was made; unchanged between two steps that allocate none."""
        return self._books.pinned_allocations

    @property
    def num_pins(self) -> int:
        """Page-locked ranges that are live: one per arena, or one per piece of it. 0 after `close`."""
        return self._pins.num_pins

    @property
    def pins_tried(self) -> int:
        """Ranges the simulated driver was asked to page-lock so far, refused ones included."""
        return self._pins.pins_tried

    @property
    def device_allocations(self) -> int:
        """Ring buffers allocated since the backend was made."""
        return self._books.device_allocations

    def hold_copies(self) -> AbstractContextManager[None]:
        """Hold every copy back until the block ends; short for `copy_gate.hold_copies()`."""
        return self._gate.hold_copies()

    def device_info(self) -> DeviceInfo:
        page_bytes = os.sysconf("SC_PAGE_SIZE")
        return DeviceInfo(
            name="CPU simulator",
            device="cpu",
            total_memory_bytes=page_bytes * os.sysconf("SC_PHYS_PAGES"),
            free_memory_bytes=page_bytes * os.sysconf("SC_AVPHYS_PAGES"),
        )

    def bind_thread(self) -> None:
        if self._observer is not None:
            self._observer.thread_bound()

    def current_stream(self) -> Stream:
        return self._caller_stream

    def new_stream(self, name: str) -> Stream:
        """Make a stream and its worker thread.

        Raises:
            BackendError: the backend is closed.
        """
        with self._lock:
            self._refuse_if_closed("new_stream")
        stream = WorkerStream(
            name,
            self._runtime,
            self._copier,
            self._close_timeout_s,
            self._forget,
            immediate_copy_bytes=self._immediate_copy_bytes,
        )
        with self._lock:
            closed_meanwhile = self._closed
            if not closed_meanwhile:
                self._streams = (*self._streams, stream)
        if closed_meanwhile:
            stream.close()
            raise BackendError(f"new_stream({name!r}): the cpu_sim backend was closed meanwhile")
        return stream

    def pinned_arena(self, nbytes: int, *, chunk_bytes: int = 0) -> SimPinnedArena:
        """Allocate exactly `nbytes`, every page touched, every byte `POISON_BYTE`. Takes the simulated pin time.

        Raises:
            MemoryError: `max_pinned_bytes`, the operating system or the simulated driver refused; the message names the
                size. Nothing is left of it.
            ValueError: `nbytes` is below 1, or `chunk_bytes` is not whole pages.
            BackendError: the backend is closed.
        """
        if nbytes < 1:
            raise ValueError(f"pinned_arena: nbytes={nbytes} must be at least 1")
        with self._lock:
            self._refuse_if_closed("pinned_arena")
        if self._observer is not None:
            self._observer.arena_wanted(nbytes)
        self._books.reserve_pinned(nbytes, self._max_pinned_bytes)
        try:
            pieces = PinnedPieces(nbytes, chunk_bytes, self._pins.pin, self._pins.unpin)
        except BaseException:
            self._books.unreserve_pinned(nbytes)
            raise
        return self._books.add_arena(pieces, report_as_pinned=self._report_arenas_as_pinned)

    def snapshot_ring(self, depth: int, nbytes: int, device: torch.device) -> SimSnapshotRing:
        """Allocate `depth` buffers of `nbytes` each, every byte `POISON_BYTE`.

        Raises:
            MemoryError: the operating system refused.
            ValueError: `depth` or `nbytes` is below 1, or `device` is not the CPU.
            BackendError: the backend is closed.
        """
        if depth < 1 or nbytes < 1:
            raise ValueError(f"snapshot_ring: depth={depth} and nbytes={nbytes} must be at least 1")
        if device.type != self.device_type:
            raise ValueError(f"snapshot_ring: cpu_sim owns {self.device_type!r} tensors, not {device}")
        with self._lock:
            self._refuse_if_closed("snapshot_ring")
        if self._observer is not None:
            self._observer.ring_wanted(depth * nbytes)
        return self._books.add_ring(
            tuple(poisoned_buffer(nbytes, f"snapshot_ring({depth}, {nbytes})") for _ in range(depth))
        )

    def copy_to_host(self, destination: torch.Tensor, source: torch.Tensor, stream: Stream) -> Event:
        """Queue one copy on the stream's worker; the source stays referenced until it is done. Never blocks the caller.

        Raises:
            ValueError: shapes or dtypes differ, a tensor is not contiguous, the source is not a CPU tensor, or the
                destination lies in no live arena of this backend. Nothing is queued.
            BackendFeatureUnsupportedError: `stream` was not made by `new_stream`.
            BackendError: the stream is closed.
        """
        if destination.shape != source.shape or destination.dtype != source.dtype:
            raise unequal_copy(destination, source)
        if not destination.is_contiguous() or not source.is_contiguous():
            raise strided_copy(destination, source)
        if not source.is_cpu:
            raise ValueError(f"copy_to_host: source lies on {source.device}; cpu_sim owns CPU tensors only")
        if not self._books.is_in_live_arena(destination):
            raise copy_outside_arenas(destination)
        if not isinstance(stream, WorkerStream):
            raise BackendFeatureUnsupportedError(
                f"copy_to_host: stream {stream.name!r} ({type(stream).__name__}) has no worker; "
                "pass a stream made by this backend's new_stream"
            )
        return stream.queue_copy(destination, source)

    def graph_padding(self, capture_sizes: tuple[int, ...]) -> CaptureSizePadding:
        return CaptureSizePadding(capture_sizes)

    def close(self) -> None:
        """End every hold, run what is queued, end the workers, close arenas and rings. Idempotent.

        Raises:
            DeviceWaitTimeoutError: queued work has not run within `close_timeout_s`; the arenas and rings stay open.
        """
        with self._lock:
            self._closed = True
            streams = self._streams
        self._gate.close()
        for stream in streams:
            stream.begin_close()
        deadline_s = self._runtime.monotonic_s() + self._close_timeout_s
        stuck: list[str] = []
        for stream in streams:
            try:
                stream.finish_close(max(0.0, deadline_s - self._runtime.monotonic_s()))
            except DeviceWaitTimeoutError as error:
                stuck.append(str(error))
        if stuck:
            raise DeviceWaitTimeoutError("cpu_sim backend not closed: " + "; ".join(stuck))
        self._books.close_all()

    def _forget(self, stream: WorkerStream) -> None:
        with self._lock:
            self._streams = tuple(kept for kept in self._streams if kept is not stream)

    def _name_of_stream_using(self, storage_address: int) -> str | None:
        for stream in self._streams:
            if stream.uses(storage_address):
                return stream.name
        return None

    def _refuse_if_closed(self, call: str) -> None:
        if self._closed:
            raise BackendError(f"{call}: the cpu_sim backend is closed")
