# SPDX-License-Identifier: Apache-2.0
"""A request inside the engine: what arrived, where it runs, and how long each part took."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

from omni_core.diffusion_kv.pipeline import Pixels, RequestState
from omni_core.diffusion_kv.snapshot import KVSnapshot
from omni_core.integrations.diffusion.intake import Arrival
from omni_core.integrations.diffusion.results import FinishedRequest, KVUse, Outcome, RequestTimings


@dataclass(slots=True, eq=False)
class EngineRequest:
    """One request from the queue to its end. The engine's thread alone reads and writes it."""

    arrival: Arrival
    snapshot: KVSnapshot | None = None
    """Its pages, once it was scheduled on a paged stage."""
    state: RequestState | None = None
    """The model's, once it was started."""
    on_worker: bool = False
    """Whether the worker may hold something of it."""
    queue_s: float = 0.0
    schedule_s: float = 0.0
    start_s: float = 0.0
    first_step_s: float = 0.0
    first_step_tokens: int = 0
    publish_s: float = 0.0
    later_steps_s: float = 0.0
    decode_s: float = 0.0

    @property
    def request_id(self) -> str:
        return self.arrival.request_id

    @property
    def generation(self) -> int | None:
        """Of its pages; `None` without any."""
        return None if self.snapshot is None else self.snapshot.generation

    @property
    def hit_tokens(self) -> int:
        return 0 if self.snapshot is None else self.snapshot.rows[0].cached_prefix_tokens

    @property
    def query_tokens(self) -> int:
        """Tokens its first step computes: rows times (total - hit)."""
        rows = self.arrival.prepared.rows
        return sum(row.layout.geometry.total_tokens - self.hit_tokens for row in rows)

    def finished(
        self, outcome: Outcome, *, image: Pixels | None = None, error: Exception | None = None
    ) -> FinishedRequest:
        """What the client is told; call it last."""
        arrival, state = self.arrival, self.state
        return FinishedRequest(
            request=arrival.prepared.request,
            outcome=outcome,
            timings=RequestTimings(
                preprocess_s=arrival.preprocess_s,
                hash_s=arrival.hash_s,
                queue_s=self.queue_s,
                schedule_s=self.schedule_s,
                start_s=self.start_s,
                encoder_s=0.0 if state is None else state.encoder_s,
                first_step_s=self.first_step_s,
                publish_s=self.publish_s,
                later_steps_s=self.later_steps_s,
                decode_s=self.decode_s,
                end_to_end_s=perf_counter() - arrival.began_at_s,
            ),
            kv=_kv_use(self.snapshot),
            rows=len(arrival.prepared.rows),
            first_step_tokens=self.first_step_tokens,
            image=image,
            latents=None if image is None or state is None else state.latents,
            error=error,
        )


def _kv_use(snapshot: KVSnapshot | None) -> KVUse:
    if snapshot is None:
        return KVUse()
    pages = {page for row in snapshot.rows for group in row.block_ids for page in group}
    return KVUse(
        queried_tokens=sum(row.geometry.total_tokens for row in snapshot.rows),
        cached_prefix_tokens=snapshot.rows[0].cached_prefix_tokens,
        pages=len(pages),
    )
