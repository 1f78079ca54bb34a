# SPDX-License-Identifier: Apache-2.0
"""What the scheduler remembers of a request until it ends."""

from __future__ import annotations

from dataclasses import dataclass

from omni_core.diffusion_kv.errors import DiffusionKVError
from omni_core.diffusion_kv.pipeline import PreparedRequest
from omni_core.diffusion_kv.reservations import RowDemand
from omni_core.diffusion_kv.snapshot import KVSnapshot
from omni_core.integrations.diffusion.request_states import LEGAL_MOVES, RequestStatus
from omni_core.integrations.diffusion.waves import ForwardKey


class LiveRequest:
    """One request that has not ended. The engine's thread only."""

    __slots__ = ("arrival", "completed_steps", "kv_rows", "prepared", "snapshot", "status")

    def __init__(self, arrival: int, prepared: PreparedRequest, kv_rows: tuple[RowDemand, ...]) -> None:
        """A waiting request; `arrival` grows from one to the next."""
        self.arrival = arrival
        self.prepared = prepared
        self.kv_rows = kv_rows
        self.status = RequestStatus.WAITING
        self.snapshot: KVSnapshot | None = None
        """Its pages, from its first wave to its end."""
        self.completed_steps = 0

    @property
    def request_id(self) -> str:
        return self.prepared.request.request_id

    @property
    def forward_key(self) -> ForwardKey:
        """What a wave's other requests must have too."""
        request = self.prepared.request
        return ForwardKey(
            layouts=tuple(row.layout for row in self.prepared.rows),
            num_inference_steps=request.num_inference_steps,
            completed_steps=self.completed_steps,
            lora=request.lora,
        )

    def transition(self, to: RequestStatus) -> None:
        """Move to the next state.

        Raises:
            DiffusionKVError: the move is not legal; an internal error.
        """
        if to not in LEGAL_MOVES[self.status]:
            raise DiffusionKVError(f"request {self.request_id!r}: illegal move {self.status.name} -> {to.name}")
        self.status = to


@dataclass(frozen=True, slots=True)
class Candidate:
    """A request about to join a wave, and the pages it would have there."""

    entry: LiveRequest
    snapshot: KVSnapshot | None

    @property
    def hit_tokens(self) -> int:
        """Leading tokens that need not be computed; the same for all rows of a request."""
        return 0 if self.snapshot is None else self.snapshot.rows[0].cached_prefix_tokens
