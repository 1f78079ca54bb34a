# SPDX-License-Identifier: Apache-2.0
"""The pinned pages a step's rows cross through, and the device buffers they are cloned into first."""

from __future__ import annotations

import torch

from omni_core.backend import ByteCarver, DeviceBackend, PinnedArena


class StagingSlot:
    """One step's page: a pinned host arena and the snapshot buffer that mirrors it, carved alike.

    Held by the open step that reads leftovers and rows from it, and by the write task until its rows are in the pool.
    Holds are counted under the state lock; the bytes belong to whoever holds the slot.
    """

    __slots__ = ("_holders", "host", "index", "page")

    def __init__(self, index: int, page: torch.Tensor) -> None:
        """`page` is the arena, uint8 `(nbytes,)`; `host` carves it."""
        self.index = index
        self.page = page
        self.host = ByteCarver(page)
        self._holders: set[str] = set()

    @property
    def holders(self) -> frozenset[str]:
        """Who holds the slot, in words for errors."""
        return frozenset(self._holders)

    def hold(self, holder: str) -> None:
        """Add a holder. State lock held."""
        self._holders.add(holder)

    def drop(self, holder: str) -> bool:
        """Remove a holder; returns whether the slot is now free. State lock held."""
        self._holders.discard(holder)
        return not self._holders


class BounceBuffer:
    """Pinned host bytes for a deferred record whose step is over: nobody but the committer reads them."""

    __slots__ = ("_arena", "index", "nbytes")

    def __init__(self, index: int, arena: PinnedArena) -> None:
        self.index = index
        self._arena = arena
        self.nbytes = arena.buffer.numel()
        """Host bytes, page-locked where the device can; 0 once closed."""

    @property
    def page(self) -> torch.Tensor:
        """uint8 CPU tensor `(nbytes,)`."""
        return self._arena.buffer

    @property
    def pinned_bytes(self) -> int:
        """Host bytes really page-locked."""
        return self._arena.pinned_bytes

    def close(self) -> None:
        """Give the memory back. No copy may still run into it. Idempotent."""
        self._arena.close()
        self.nbytes = 0


class StagingBufferPool:
    """`staging_depth` staging slots, allocated when the cache is built and never after.

    `try_claim` and `release` are called with the state lock held and touch no bytes.
    """

    def __init__(
        self, backend: DeviceBackend, depth: int, arena_bytes: int, device: torch.device, *, pin_chunk_bytes: int = 0
    ) -> None:
        """Pin `depth * arena_bytes` of host memory and as much device memory. Slow; start-up only.

        Args:
            backend: of the device.
            depth: how many slots.
            arena_bytes: size of each slot's page.
            device: where the ring lies.
            pin_chunk_bytes: most bytes page-locked at a time; 0: a whole page.

        Raises:
            MemoryError: the backend was refused the memory; what was allocated before is given back.
        """
        self.arena_bytes = arena_bytes
        self._arenas = []
        try:
            for _ in range(depth):
                self._arenas.append(backend.pinned_arena(arena_bytes, chunk_bytes=pin_chunk_bytes))
            self._ring = backend.snapshot_ring(depth, arena_bytes, device)
        except BaseException:
            for arena in self._arenas:
                arena.close()
            raise
        self._staging_bytes = sum(arena.buffer.numel() for arena in self._arenas)
        self._slots = [StagingSlot(index, arena.buffer) for index, arena in enumerate(self._arenas)]
        self._free = list(reversed(self._slots))

    @property
    def pinned_bytes(self) -> int:
        """Host bytes really page-locked."""
        return sum(arena.pinned_bytes for arena in self._arenas)

    @property
    def staging_bytes(self) -> int:
        """Host bytes of the pages, page-locked where the device can."""
        return self._staging_bytes

    @property
    def device_bytes(self) -> int:
        """Device bytes of the snapshot ring."""
        return self._ring.device_bytes

    @property
    def in_use(self) -> tuple[StagingSlot, ...]:
        """Slots that someone holds."""
        return tuple(slot for slot in self._slots if slot.holders)

    @property
    def has_free(self) -> bool:
        """Whether `try_claim` would succeed."""
        return bool(self._free)

    def try_claim(self, holder: str) -> StagingSlot | None:
        """Take a free slot for `holder`, or `None`."""
        if not self._free:
            return None
        slot = self._free.pop()
        slot.host.restart()
        slot.hold(holder)
        return slot

    def release(self, slot: StagingSlot, holder: str) -> None:
        """`holder` is done with `slot`; the last one frees it."""
        if holder in slot.holders and slot.drop(holder):
            self._free.append(slot)

    def device_carver(self, slot: StagingSlot) -> ByteCarver:
        """The carver over the slot's snapshot buffer, restarted."""
        return self._ring.slot(slot.index)

    def close(self) -> None:
        """Give all memory back. No copy may still run. Idempotent."""
        for arena in self._arenas:
            arena.close()
        self._ring.close()
        self._staging_bytes = 0
        # A closed cache may be kept for its figures; views would keep the memory itself.
        self._arenas.clear()
        self._slots.clear()
        self._free.clear()
