# SPDX-License-Identifier: Apache-2.0
"""Prepared requests of a few numbers, and pages on paper: a `KVReservations` whose hits a test writes down."""

from dataclasses import dataclass, field

from omni_core.diffusion_kv.errors import DiffusionKVError, RequestRefusedError
from omni_core.diffusion_kv.pipeline import DiffusionRequest, LoRARequest, PreparedRow
from omni_core.diffusion_kv.reservations import KVReservationStats, RowDemand
from omni_core.diffusion_kv.rows import RowGeometry, RowLayout
from omni_core.diffusion_kv.snapshot import KVSnapshot, RowSnapshot
from omni_core.integrations.diffusion.admission import AdmissionEnvelope
from omni_core.integrations.diffusion.scheduler import DiffusionScheduler

GEOMETRY = RowGeometry(70, 40, 113)
ENVELOPE = AdmissionEnvelope(max_rows=2, max_total_tokens=200, max_target_tokens=60)


@dataclass(frozen=True)
class Prepared:
    """What a scheduler reads of a request after preprocessing."""

    request: DiffusionRequest
    rows: tuple


def prepared(request_id, *, geometry=GEOMETRY, num_rows=2, steps=8, lora=None):
    request = DiffusionRequest(request_id, "a fox", num_inference_steps=steps, lora=lora)
    row = PreparedRow(tuple(range(geometry.total_tokens)), RowLayout(geometry, ()))
    return Prepared(request, (row,) * num_rows)


def adapter(*, lora_id=1, scale=1.0):
    return LoRARequest("ink", lora_id, "/adapters/ink", 0, scale)


def kv_rows(of, identities=None):
    identities = identities or (None,) * len(of.rows)
    return [RowDemand(row.layout.geometry, identity) for row, identity in zip(of.rows, identities, strict=True)]


@dataclass
class PagesOnPaper:
    """One page a request; `hits` says what each finds, `never` who can never be served."""

    free_pages: int = 100
    hits: dict = field(default_factory=dict)
    never: set = field(default_factory=set)
    live: dict = field(default_factory=dict)
    calls: list = field(default_factory=list)
    generation: int = 0

    def reserve(self, request_id, rows, *, only_at_hit_tokens=None):
        if request_id in self.never:
            raise RequestRefusedError(request_id, "too large")
        if request_id in self.live:
            raise RequestRefusedError(request_id, "it holds pages already")
        hit_tokens = self.hits.get(request_id, 0)
        if not self.free_pages or only_at_hit_tokens not in (None, hit_tokens):
            return None
        self.calls.append(("reserve", request_id))
        self.free_pages -= 1
        self.generation += 1
        self.live[request_id] = self.generation
        snapshots = (RowSnapshot(index, row.geometry, hit_tokens, ((1,),)) for index, row in enumerate(rows))
        return KVSnapshot(request_id, self.generation, tuple(snapshots))

    def publish(self, request_id, generation):
        if self.live.get(request_id) != generation:
            raise DiffusionKVError(f"{request_id} of generation {generation} is not live")
        self.calls.append(("publish", request_id))

    def free(self, request_id, generation):
        if self.live.get(request_id) == generation:
            self.calls.append(("free", request_id))
            self.free_pages += 1
            del self.live[request_id]

    def reset(self):
        return not self.live

    def stats(self):
        return KVReservationStats(0, 0, 0, 0, 0, self.free_pages, 100)


def scheduler_on(pages, *, max_wave_requests=4, max_running_requests=8):
    return DiffusionScheduler(
        pages, ENVELOPE, max_wave_requests=max_wave_requests, max_running_requests=max_running_requests
    )


def add(scheduler, *requests):
    for request in requests:
        scheduler.add(request, kv_rows(request))


def queued(pages, *requests, **limits):
    """A paged scheduler with these requests in its queue."""
    scheduler = scheduler_on(pages, **limits)
    add(scheduler, *requests)
    return scheduler


def wave_ids(scheduler):
    """The request ids of the next wave, none for no wave."""
    wave = scheduler.schedule()
    return () if wave is None else wave.request_ids
