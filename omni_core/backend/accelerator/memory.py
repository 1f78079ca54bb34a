# SPDX-License-Identifier: Apache-2.0
"""Pinned arenas and device rings, and the books that keep them alive for as long as a copy may use them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import pairwise

import torch

from omni_core.backend.accelerator.device import AcceleratorDevice
from omni_core.backend.accelerator.in_flight import CopyParts, MemoryUse
from omni_core.backend.accelerator.pinning import PinnedMemory
from omni_core.backend.base import PinnedArena
from omni_core.backend.carved_ring import CarvedRing
from omni_core.backend.errors import BackendError
from omni_core.runtime import Runtime

logger = logging.getLogger(__name__)

UseOf = Callable[[int], MemoryUse]
"""What copies do with the storage at an address."""


class LiveMemory:
    """Every arena and ring of one backend that is not given back. Any thread; one that closes something is bound first.

    Args:
        runtime: makes the lock.
        device: where threads are bound to.
        use_of: asks every stream.
    """

    def __init__(self, runtime: Runtime, device: AcceleratorDevice, use_of: UseOf) -> None:
        self._lock = runtime.lock("accelerator.memory")
        self._device = device
        self._use_of = use_of
        self._arenas: dict[int, AcceleratorArena] = {}
        self._rings: dict[int, AcceleratorRing] = {}
        self._kept: list[PinnedMemory | tuple[torch.Tensor, ...]] = []

    @property
    def num_kept(self) -> int:
        """Arenas and rings that were closed, but must not be freed."""
        return len(self._kept)

    def arena_of(self, tensor: torch.Tensor) -> AcceleratorArena | None:
        """The live arena that `tensor` is a view of. Asks the books; `Tensor.is_pinned` asks the driver."""
        return self._arenas.get(tensor.untyped_storage().data_ptr())

    def add_arena(self, memory: PinnedMemory, piece_bytes: int) -> AcceleratorArena:
        """Enter a range that is page-locked in pieces of `piece_bytes`; 0: in one."""
        arena = AcceleratorArena(self, memory, piece_bytes)
        with self._lock:
            self._arenas[arena.address] = arena
        return arena

    def add_ring(self, buffers: tuple[torch.Tensor, ...]) -> AcceleratorRing:
        """Enter device buffers."""
        ring = AcceleratorRing(self, buffers)
        with self._lock:
            self._rings[id(ring)] = ring
        return ring

    def remove_arena(self, arena: AcceleratorArena, memory: PinnedMemory) -> None:
        """Strike an arena out and unlock it, or keep its memory if the device may still write there.

        Raises:
            BackendError: a queued copy still runs into it; nothing changes.
        """
        use = self._use_unless_queued("pinned arena", (arena.address,))
        with self._lock:
            if self._arenas.pop(arena.address, None) is None:
                return
        if use is MemoryUse.NONE:
            try:
                memory.close()
                return
            except BackendError as error:
                logger.warning("%d page-locked bytes stay as they are until the process ends: %s", arena.nbytes, error)
        else:
            logger.warning(
                "%d page-locked bytes stay as they are until the process ends: a copy into them failed, and the device "
                "may still write there",
                arena.nbytes,
            )
        self._kept.append(memory)

    def remove_ring(self, ring: AcceleratorRing, buffers: tuple[torch.Tensor, ...]) -> None:
        """Strike a ring out, or keep its memory if the device may still read from it.

        Raises:
            BackendError: a queued copy still reads from it; nothing changes.
        """
        addresses = tuple(buffer.untyped_storage().data_ptr() for buffer in buffers)
        use = self._use_unless_queued("snapshot ring", addresses)
        with self._lock:
            self._rings.pop(id(ring), None)
        if use is MemoryUse.UNKNOWN:
            self._kept.append(buffers)

    def close_all(self) -> None:
        """Close what is still open. No copy may be queued."""
        with self._lock:
            arenas, rings = tuple(self._arenas.values()), tuple(self._rings.values())
        for ring in rings:
            ring.close()
        for arena in arenas:
            arena.close()

    def _use_unless_queued(self, what: str, addresses: tuple[int, ...]) -> MemoryUse:
        # The driver's books are per device, and whoever closes a cache may never have used the device.
        if not self._device.try_bind_thread():
            return MemoryUse.UNKNOWN
        uses = {self._use_of(address) for address in addresses}
        if MemoryUse.QUEUED in uses:
            raise BackendError(f"{what}: closed while a queued copy still uses it; wait for the copy's event first")
        return MemoryUse.UNKNOWN if MemoryUse.UNKNOWN in uses else MemoryUse.NONE


class AcceleratorArena(PinnedArena):
    """A page-locked range, accounted for in the backend's books."""

    def __init__(self, books: LiveMemory, memory: PinnedMemory, piece_bytes: int) -> None:
        self._books = books
        self._memory: PinnedMemory | None = memory
        self._piece_bytes = piece_bytes
        buffer = self.buffer
        self.address = buffer.untyped_storage().data_ptr()
        """Where the range lies; tells its views from others."""
        self.nbytes = buffer.numel()

    @property
    def buffer(self) -> torch.Tensor:
        """uint8 CPU tensor `(nbytes,)`.

        Raises:
            BackendError: the arena is closed.
        """
        buffer = None if self._memory is None else self._memory.buffer
        if buffer is None:
            raise BackendError("pinned arena: read after close")
        return buffer

    @property
    def pinned_bytes(self) -> int:
        return 0 if self._memory is None else self._memory.pinned_bytes

    def parts_of(self, destination: torch.Tensor, source: torch.Tensor) -> CopyParts:
        """A copy into a contiguous view of the arena, cut where two pieces meet.

        CUDA refuses a copy that runs from one registered range into another (sgl-project/sglang#36798).
        """
        nbytes = destination.nbytes
        first = destination.data_ptr() - self.address
        if self._piece_bytes == 0 or nbytes == 0 or first % self._piece_bytes + nbytes <= self._piece_bytes:
            return ((destination, source),)
        seams = range(self._piece_bytes - first % self._piece_bytes, nbytes, self._piece_bytes)
        to, of = destination.view(-1).view(torch.uint8), source.view(-1).view(torch.uint8)
        return tuple((to[start:stop], of[start:stop]) for start, stop in pairwise((0, *seams, nbytes)))

    def close(self) -> None:
        """Unlock the range. Idempotent. Memory that the device may still write to is kept, with a warning.

        Raises:
            BackendError: a queued copy still runs into it; it stays open.
        """
        if self._memory is not None:
            self._books.remove_arena(self, self._memory)
            self._memory = None


class AcceleratorRing(CarvedRing):
    """Device buffers, accounted for in the backend's books. Those that the device may still read are kept."""

    def __init__(self, books: LiveMemory, buffers: tuple[torch.Tensor, ...]) -> None:
        super().__init__(buffers)
        self._books = books

    def _remove_from_books(self, buffers: tuple[torch.Tensor, ...]) -> None:
        self._books.remove_ring(self, buffers)
