# SPDX-License-Identifier: Apache-2.0
"""Arenas and snapshot rings with exact books: what is live, what was ever allocated, what may not be freed."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection

import torch

from omni_core.backend.base import PinnedArena
from omni_core.backend.carved_ring import CarvedRing
from omni_core.backend.errors import BackendError
from omni_core.backend.observer import ByteRange, DeviceObserver
from omni_core.backend.pinned_pieces import PinnedPieces
from omni_core.runtime import Runtime

POISON_BYTE = 0xFF
"""What fresh buffers hold: NaN in every floating dtype, -1 in every signed one, so a row nobody wrote shows."""


class PinDriver:
    """What page-locks memory: refuses what is too large for one pin, and chosen pins; takes time. Poisons what it pins.

    Args:
        runtime: its clock passes.
        seconds_per_byte: how long a pin takes.
        max_pin_bytes: most bytes of one pin; `None`: no limit.
        refused_pins: numbers of the pins that are refused, counted from 1.
    """

    def __init__(
        self, runtime: Runtime, seconds_per_byte: float, max_pin_bytes: int | None, refused_pins: Collection[int]
    ) -> None:
        self._runtime = runtime
        self._seconds_per_byte = seconds_per_byte
        self._max_pin_bytes = max_pin_bytes
        self._refused_pins = frozenset(refused_pins)
        self._lock = runtime.lock("cpu_sim.pins")
        self._tried = 0
        self._pinned: dict[int, int] = {}

    @property
    def num_pins(self) -> int:
        """Pins that are live."""
        return len(self._pinned)

    @property
    def pins_tried(self) -> int:
        """Pins asked for so far, refused ones included."""
        return self._tried

    def pin(self, address: int, nbytes: int) -> None:
        """Pin a range.

        Raises:
            MemoryError: refused; says why.
        """
        with self._lock:
            self._tried += 1
            if self._max_pin_bytes is not None and nbytes > self._max_pin_bytes:
                raise MemoryError(
                    f"max_pin_bytes={self._max_pin_bytes} of the simulated driver; set pin_chunk_bytes to that or less"
                )
            if self._tried in self._refused_pins:
                raise MemoryError(f"the simulated driver refuses pin {self._tried}")
            self._pinned[address] = nbytes
        ctypes.memset(address, POISON_BYTE, nbytes)
        if self._seconds_per_byte:
            self._runtime.sleep(nbytes * self._seconds_per_byte)

    def unpin(self, address: int, nbytes: int) -> None:
        """Unpin a range that was pinned as it is.

        Raises:
            BackendError: it was not.
        """
        with self._lock:
            if self._pinned.pop(address, None) != nbytes:
                raise BackendError(f"unpin of {nbytes} bytes at {address:#x}, which are not one pin")


def poisoned_buffer(nbytes: int, purpose: str) -> torch.Tensor:
    """A fresh uint8 CPU tensor `(nbytes,)` with every page touched and every byte `POISON_BYTE`.

    Raises:
        MemoryError: the operating system refused; the message names `purpose` and the size.
    """
    try:
        # An inference tensor could not be written by a thread outside inference mode.
        with torch.inference_mode(False):
            return torch.full((nbytes,), POISON_BYTE, dtype=torch.uint8, device="cpu")
    except (RuntimeError, MemoryError) as error:
        raise MemoryError(f"{purpose}: the operating system refused {nbytes} bytes ({error})") from error


class MemoryBooks:
    """Accounts for every arena and ring of one backend. Any thread.

    Args:
        runtime: makes the lock.
        user_of: names the stream whose queued work still uses the storage at an address, or `None`.
        observer: told of arenas.
    """

    def __init__(
        self, runtime: Runtime, user_of: Callable[[int], str | None], observer: DeviceObserver | None = None
    ) -> None:
        self._lock = runtime.lock("cpu_sim.memory")
        self._user_of = user_of
        self._observer = observer
        self._arenas: dict[int, SimPinnedArena] = {}
        self._rings: dict[int, SimSnapshotRing] = {}
        self._pinned_bytes = 0
        self._device_bytes = 0
        self._pinned_allocations = 0
        self._device_allocations = 0

    @property
    def pinned_bytes(self) -> int:
        """Bytes of live arenas."""
        return self._pinned_bytes

    @property
    def device_bytes(self) -> int:
        """Bytes of live rings."""
        return self._device_bytes

    @property
    def pinned_allocations(self) -> int:
        """Arenas ever allocated."""
        return self._pinned_allocations

    @property
    def device_allocations(self) -> int:
        """Ring buffers ever allocated."""
        return self._device_allocations

    def is_in_live_arena(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is a view of a live arena's buffer. Takes no lock."""
        return tensor.untyped_storage().data_ptr() in self._arenas

    def reserve_pinned(self, nbytes: int, max_pinned_bytes: int | None) -> None:
        """Count `nbytes` as pinned before they are allocated.

        Raises:
            MemoryError: `max_pinned_bytes` does not allow them; nothing is counted.
        """
        with self._lock:
            if max_pinned_bytes is not None and self._pinned_bytes + nbytes > max_pinned_bytes:
                raise MemoryError(
                    f"pinned_arena({nbytes}): {self._pinned_bytes} bytes are pinned and "
                    f"max_pinned_bytes={max_pinned_bytes}; raise it or ask for less"
                )
            self._pinned_bytes += nbytes

    def unreserve_pinned(self, nbytes: int) -> None:
        """Take a reservation back whose allocation failed."""
        with self._lock:
            self._pinned_bytes -= nbytes

    def add_arena(self, pieces: PinnedPieces, *, report_as_pinned: bool) -> SimPinnedArena:
        """Enter an arena over `pieces`, whose bytes are reserved."""
        arena = SimPinnedArena(self, pieces, report_as_pinned=report_as_pinned)
        with self._lock:
            self._arenas[arena.address] = arena
            self._pinned_allocations += 1
        if self._observer is not None:
            self._observer.arena_made(ByteRange.of(arena.buffer))
        return arena

    def remove_arena(self, arena: SimPinnedArena, nbytes: int) -> None:
        """Strike an arena out.

        Raises:
            BackendError: a queued copy still runs into it; nothing changes.
        """
        self._refuse_if_used("pinned arena", arena.address, nbytes)
        with self._lock:
            struck = self._arenas.pop(arena.address, None) is not None
            if struck:
                self._pinned_bytes -= nbytes
        if struck and self._observer is not None:
            self._observer.arena_closed(ByteRange(arena.address, arena.address + nbytes))

    def add_ring(self, buffers: tuple[torch.Tensor, ...]) -> SimSnapshotRing:
        """Enter a ring over `buffers`."""
        ring = SimSnapshotRing(self, buffers)
        with self._lock:
            self._rings[id(ring)] = ring
            self._device_bytes += ring.device_bytes
            self._device_allocations += len(buffers)
        return ring

    def remove_ring(self, ring: SimSnapshotRing, buffers: tuple[torch.Tensor, ...]) -> None:
        """Strike a ring out.

        Raises:
            BackendError: a queued copy still reads from it; nothing changes.
        """
        for buffer in buffers:
            self._refuse_if_used("snapshot ring buffer", buffer.untyped_storage().data_ptr(), buffer.numel())
        with self._lock:
            if self._rings.pop(id(ring), None) is not None:
                self._device_bytes -= sum(buffer.numel() for buffer in buffers)

    def close_all(self) -> None:
        """Close whatever is live; every stream must have ended."""
        for arena in tuple(self._arenas.values()):
            arena.close()
        for ring in tuple(self._rings.values()):
            ring.close()

    def _refuse_if_used(self, what: str, address: int, nbytes: int) -> None:
        stream_name = self._user_of(address)
        if stream_name is not None:
            raise BackendError(
                f"{what} of {nbytes} bytes: closed while a copy queued on stream {stream_name!r} still uses it; "
                "wait for the copy's event first"
            )


class SimPinnedArena(PinnedArena):
    """A plain buffer accounted like page-locked memory."""

    def __init__(self, books: MemoryBooks, pieces: PinnedPieces, *, report_as_pinned: bool) -> None:
        self._books = books
        self._pieces = pieces
        self._address = self.buffer.untyped_storage().data_ptr()
        self._report_as_pinned = report_as_pinned

    @property
    def address(self) -> int:
        """Where the buffer's storage lies; identifies its views."""
        return self._address

    @property
    def buffer(self) -> torch.Tensor:
        buffer = self._pieces.buffer
        if buffer is None:
            raise BackendError("pinned arena: read after close")
        return buffer

    @property
    def pinned_bytes(self) -> int:
        return self._pieces.pinned_bytes if self._report_as_pinned else 0

    def close(self) -> None:
        """Give the bytes back. Idempotent.

        Raises:
            BackendError: a queued copy still runs into the arena, which stays open.
        """
        buffer = self._pieces.buffer
        if buffer is not None:
            self._books.remove_arena(self, buffer.numel())
            self._pieces.close()


class SimSnapshotRing(CarvedRing):
    """Plain buffers accounted like device memory."""

    def __init__(self, books: MemoryBooks, buffers: tuple[torch.Tensor, ...]) -> None:
        super().__init__(buffers)
        self._books = books

    def _remove_from_books(self, buffers: tuple[torch.Tensor, ...]) -> None:
        self._books.remove_ring(self, buffers)
