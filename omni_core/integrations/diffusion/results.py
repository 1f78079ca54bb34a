# SPDX-License-Identifier: Apache-2.0
"""What the engine says of a request that ended: the picture or why there is none, the time and the pages it took."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from omni_core.diffusion_kv.pipeline import DiffusionRequest, Pixels
from omni_core.diffusion_kv.reservations import KVReservationStats


class Outcome(Enum):
    """How a request ended."""

    COMPLETED = "completed"
    ABORTED = "aborted"
    REFUSED = "refused"
    """It could never be served; nothing of it was computed."""
    FAILED = "failed"
    """Its forward, its start or its decoding raised."""


@dataclass(frozen=True, slots=True)
class RequestTimings:
    """Seconds by the wall clock. A step's are the whole wave's. 0.0 for what the request did not reach."""

    preprocess_s: float = 0.0
    hash_s: float = 0.0
    """Identifying the rows, image hashing above all; 0.0 where prefix caching is off."""
    queue_s: float = 0.0
    """From being added to the attempt to admit it that succeeded."""
    schedule_s: float = 0.0
    """Block hashes, lookup and reservation of pages, and the worker's installing them."""
    start_s: float = 0.0
    """Encoders, embeddings and noise."""
    encoder_s: float = 0.0
    """The reference encoders' part of `start_s`."""
    first_step_s: float = 0.0
    """Step 0, until every rank had computed it."""
    publish_s: float = 0.0
    later_steps_s: float = 0.0
    decode_s: float = 0.0
    end_to_end_s: float = 0.0
    """From `add_request` to the end."""


@dataclass(frozen=True, slots=True)
class KVUse:
    """What one request took from the cache and left for its first step. All zero where the model owns its KV."""

    queried_tokens: int = 0
    """Tokens of all rows."""
    cached_prefix_tokens: int = 0
    """The hit, the same in each row."""
    pages: int = 0
    """Distinct pages of all rows; those that were hit may be others' too."""


@dataclass(frozen=True, slots=True, eq=False)
class FinishedRequest:
    """One request that ended."""

    request: DiffusionRequest
    outcome: Outcome
    timings: RequestTimings
    kv: KVUse
    rows: int = 0
    """CFG rows; 0 for a request that was refused before it was laid out."""
    first_step_tokens: int = 0
    """Rows times (total - hit): what step 0 computed; 0 if it never ran."""
    image: Pixels | None = None
    latents: torch.Tensor | None = None
    """The latents behind `image`."""
    error: Exception | None = None
    """Why there is no image; `None` for a completed and for an aborted request."""

    @classmethod
    def never_queued(cls, request: DiffusionRequest, error: Exception) -> FinishedRequest:
        """A request that was refused when it was added."""
        return cls(request, Outcome.REFUSED, RequestTimings(), KVUse(), error=error)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    def picture(self) -> Pixels:
        """The image.

        Raises:
            Exception: the request's own error.
            LookupError: it was aborted.
        """
        if self.image is not None:
            return self.image
        if self.error is not None:
            raise self.error
        raise LookupError(f"request {self.request_id!r} was {self.outcome.value}; it has no image")


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine's state and what it did since it was opened."""

    waiting_requests: int
    running_requests: int
    running_waves: int
    completed_requests: int
    aborted_requests: int
    refused_requests: int
    failed_requests: int
    forwards: int
    first_step_tokens: int
    """Of every step 0."""
    weight_epoch: int
    kv: KVReservationStats | None
    """`None` where the model owns its KV."""
