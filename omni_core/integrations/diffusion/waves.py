# SPDX-License-Identifier: Apache-2.0
"""Requests that share one forward per step, and what the scheduler says when one of them ends."""

from __future__ import annotations

from dataclasses import dataclass

from omni_core.diffusion_kv.errors import RequestRefusedError
from omni_core.diffusion_kv.pipeline import LoRARequest, PreparedRequest
from omni_core.diffusion_kv.rows import RowLayout
from omni_core.diffusion_kv.snapshot import KVSnapshot


@dataclass(frozen=True, slots=True)
class ForwardKey:
    """What requests must have in common to share every forward of a wave, apart from their hit."""

    layouts: tuple[RowLayout, ...]
    """Per row."""
    num_inference_steps: int
    completed_steps: int
    """0, but for a request that was preempted."""
    lora: LoRARequest | None
    """Id, scale and everything else of the adapter."""


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request of a wave."""

    prepared: PreparedRequest
    snapshot: KVSnapshot | None
    """Its pages, to be installed on the worker before the first step; `None` on a dense stage."""

    @property
    def request_id(self) -> str:
        return self.prepared.request.request_id


@dataclass(frozen=True, slots=True)
class Wave:
    """Requests of one layout, adapter, number of steps and hit, in order of arrival."""

    wave_id: int
    """Counts up from 0."""
    requests: tuple[ScheduledRequest, ...]
    """At least one."""
    forward_key: ForwardKey
    hit_tokens: int
    """Leading tokens of every row that step 0 skips; 0 on a dense stage."""

    @property
    def request_ids(self) -> tuple[str, ...]:
        return tuple(scheduled.request_id for scheduled in self.requests)


@dataclass(frozen=True, slots=True)
class KVRemoval:
    """The worker drops the rows it holds for this request in this generation. To be sent before any later install."""

    request_id: str
    generation: int


@dataclass(frozen=True, slots=True)
class FailedRequest:
    """A waiting request that can never be served. Its client gets the error; the others go on."""

    prepared: PreparedRequest
    error: RequestRefusedError
