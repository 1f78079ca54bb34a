# SPDX-License-Identifier: Apache-2.0
"""The device bytes that deferred rows wait in: one arena, handed out front to back and given back oldest first."""

from __future__ import annotations

from collections import deque

import torch

from omni_core.backend import ByteCarver, DeviceBackend
from omni_core.backend.memory import CARVE_ALIGNMENT_BYTES

_MAX_CARVERS = 512
"""Places whose views are kept; records of ever new sizes come to ever new places."""


class RingTicket:
    """One record's charged bytes of the ring, in one piece. Given back exactly once."""

    __slots__ = ("nbytes", "returned", "start")

    def __init__(self, start: int, nbytes: int) -> None:
        self.start = start
        self.nbytes = nbytes
        self.returned = False


class DeviceRing:
    """A budget of device bytes, allocated once. Methods need the state lock; `carver` and `view` touch bytes, not it.

    Records take bytes in the order of their steps and mostly return them in it. What lies behind a record that is still
    there stays taken until that one is returned, so a free place is found by looking at both ends alone.
    """

    def __init__(self, backend: DeviceBackend, budget_bytes: int, device: torch.device) -> None:
        """Allocate `budget_bytes` on `device`, rounded down to whole carving steps. Slow; start-up only. No lock held.

        Raises:
            MemoryError: the device refused.
        """
        self.capacity_bytes = budget_bytes // CARVE_ALIGNMENT_BYTES * CARVE_ALIGNMENT_BYTES
        self._ring = backend.snapshot_ring(1, self.capacity_bytes, device)
        with torch.inference_mode(False):
            self._arena = self._ring.slot(0).take((self.capacity_bytes,), torch.uint8)
        self._first_carver = ByteCarver(self._arena)
        self._carvers: dict[int, ByteCarver] = {}
        self._tickets: deque[RingTicket] = deque()
        self._end = 0
        self.charged_bytes = 0
        """Bytes of records that are on the device."""
        self.num_charged = 0
        """How many records that is."""

    @property
    def device_bytes(self) -> int:
        """Device bytes the ring holds, charged or not."""
        return self._ring.device_bytes

    def try_charge(self, nbytes: int) -> RingTicket | None:
        """Take `nbytes`, a multiple of the carving step, or `None` if there is no room in one piece."""
        start = self._place(nbytes, self._tickets[0] if self._tickets else None)
        if start is None:
            return None
        ticket = RingTicket(start, nbytes)
        self._tickets.append(ticket)
        self._end = start + nbytes
        self.charged_bytes += nbytes
        self.num_charged += 1
        return ticket

    def would_fit(self, nbytes: int, oldest_kept: RingTicket | None) -> bool:
        """Whether `try_charge` would succeed once all tickets older than `oldest_kept` (`None`: all) were returned."""
        return self._place(nbytes, oldest_kept) is not None

    def give_back(self, ticket: RingTicket) -> None:
        """The record's bytes may be overwritten: nothing reads or writes them any more.

        Raises:
            RuntimeError: the ticket was returned before; an internal error.
        """
        if ticket.returned:
            raise RuntimeError(f"device bytes {ticket.start} to {ticket.start + ticket.nbytes} were returned twice")
        ticket.returned = True
        self.charged_bytes -= ticket.nbytes
        self.num_charged -= 1
        while self._tickets and self._tickets[0].returned:
            self._tickets.popleft()

    def carver(self, ticket: RingTicket) -> ByteCarver:
        """Carves the ticket's bytes, from their first. Engine thread; valid until the next call.

        Records of a decode phase are alike and come round to the same places; a carver keeps the views it has made.
        """
        carver = self._carvers.get(ticket.start)
        if carver is None:
            if len(self._carvers) == _MAX_CARVERS:
                self._carvers.clear()
            carver = self._carvers[ticket.start] = self._first_carver.sibling()
        carver.restart(ticket.start)
        return carver

    def view(self, ticket: RingTicket) -> torch.Tensor:
        """uint8 device tensor `(nbytes,)`: what was carved for the ticket. Any thread."""
        return self._arena[ticket.start : ticket.start + ticket.nbytes]

    def close(self) -> None:
        """Free the arena. No copy may still read from it. No lock held. Idempotent."""
        self._ring.close()
        self._arena = self._arena.new_empty(0)
        self._first_carver = ByteCarver(self._arena)
        self._carvers.clear()

    def _place(self, nbytes: int, oldest: RingTicket | None) -> int | None:
        """First byte for `nbytes` if the ring held the tickets from `oldest` on."""
        if oldest is None:
            return 0 if nbytes <= self.capacity_bytes else None
        if self._end <= oldest.start:  # the taken bytes run over the arena's end
            return self._end if nbytes <= oldest.start - self._end else None
        if nbytes <= self.capacity_bytes - self._end:
            return self._end
        return 0 if nbytes <= oldest.start else None
