# SPDX-License-Identifier: Apache-2.0
"""What the engine asks of whoever hands out pages. vLLM's KV manager stands behind it in production."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from omni_core.diffusion_kv.rows import RowGeometry, RowIdentity
from omni_core.diffusion_kv.snapshot import KVSnapshot


@dataclass(frozen=True, slots=True)
class RowDemand:
    """One row that wants pages."""

    geometry: RowGeometry
    identity: RowIdentity | None
    """`None` where prefix caching is off: the row then neither hits nor is published."""


@dataclass(frozen=True, slots=True)
class KVReservationStats:
    """What was asked and found since the start."""

    requests: int
    """Successful reservations."""
    queried_tokens: int
    hit_tokens: int
    published_requests: int
    evicted_pages: int
    """Hashed pages given to someone else."""
    free_pages: int
    total_pages: int
    """Pages a request may use; vLLM's null page is not one."""


@dataclass(frozen=True, slots=True)
class PageState:
    """One page at one moment, for tests and diagnosis."""

    page_id: int
    num_rows: int
    """Rows that hold it; 0: free."""
    published: bool
    """Whether a later request can hit it."""


class KVReservations(Protocol):
    """Pages of all rows of a request, or none. The engine's one thread calls; nothing blocks."""

    def reserve(
        self, request_id: str, rows: Sequence[RowDemand], *, only_at_hit_tokens: int | None = None
    ) -> KVSnapshot | None:
        """Pages for every row, or `None`: none are free now, ask again later.

        Args:
            request_id: the public request.
            rows: its rows, in order.
            only_at_hit_tokens: of a request that joins a wave, that wave's hit. With another one it gets `None`, and
                takes and evicts nothing; it comes again for the next wave.

        Raises:
            RequestRefusedError: malformed, already live, or too large for the empty pool; nothing was changed.
        """
        ...

    def publish(self, request_id: str, generation: int) -> None:
        """Offer the full prefix pages to later requests. Idempotent. Call once every rank has computed step 0.

        Raises:
            DiffusionKVError: the request is not live in this generation.
        """
        ...

    def free(self, request_id: str, generation: int) -> None:
        """Give the pages back; published ones stay findable until evicted. A second call does nothing."""
        ...

    def reset(self) -> bool:
        """Forget every published page. `False`, and nothing is changed, while any request is live."""
        ...

    def stats(self) -> KVReservationStats: ...
