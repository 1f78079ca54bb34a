# SPDX-License-Identifier: Apache-2.0
"""One CFG row in the clothes of a vLLM `Request`: what `KVCacheManager` reads of one, and nothing else.

vLLM 0.32 reads nine attributes to look up, allocate, publish and free (`request_id`, `num_tokens`,
`num_prompt_tokens`, `num_computed_tokens`, `block_hashes`, `skip_reading_prefix_cache`, `status`,
`num_in_flight_tokens`, `shared_prefix_boundary`), `num_preemptions` for its statistics, and the rest for extra hash
keys and KV events. Rows live in the scheduler and are never sent to a worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.v1.request import RequestStatus

from omni_core.diffusion_kv.reservations import RowDemand
from omni_core.diffusion_kv.rows import ImageFeature


@dataclass(frozen=True, slots=True)
class FeaturePosition:
    """Where a feature lies in its row, as vLLM's `PlaceholderRange` says it."""

    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class NativeFeature:
    """An image as vLLM hashes it: an identifier, and the position it intersects blocks by."""

    identifier: str
    mm_position: FeaturePosition

    @classmethod
    def of(cls, feature: ImageFeature) -> NativeFeature:
        """The whole span. vLLM's key holds where a span starts, not where it ends, so its length joins the name."""
        length = feature.end - feature.start
        return cls(f"{feature.identifier}/{length}", FeaturePosition(feature.start, length))


class RowRequest:
    """One row to vLLM's KV manager. The engine's thread only."""

    __slots__ = (
        "all_token_ids",
        "block_hashes",
        "mm_features",
        "num_computed_tokens",
        "num_prompt_tokens",
        "num_tokens",
        "request_id",
        "shared_prefix_boundary",
    )

    status = RequestStatus.WAITING
    num_in_flight_tokens = 0
    num_preemptions = 0
    lora_request = None  # adapter, salt and the like are in the namespace, the root of the chain
    cache_salt = None
    prompt_embeds = None
    session_id = None

    def __init__(self, request_id: str, row_index: int, demand: RowDemand) -> None:
        """The row of one demand, not yet hashed: it neither hits nor is published until `hash_prefix_blocks`."""
        identity = demand.identity
        self.request_id = f"{request_id}/row{row_index}"
        self.num_tokens = demand.geometry.total_tokens
        self.num_prompt_tokens = demand.geometry.prefix_tokens
        self.num_computed_tokens = 0
        self.shared_prefix_boundary = 0
        self.block_hashes: list[Any] = []
        """vLLM's `BlockHash` of each full prefix block."""
        self.all_token_ids: tuple[int, ...] = () if identity is None else identity.token_ids
        self.mm_features: tuple[NativeFeature, ...] = (
            () if identity is None else tuple(map(NativeFeature.of, identity.features))
        )

    @property
    def skip_reading_prefix_cache(self) -> bool:
        """A row without hashes has no identity, and may be given nobody's pages."""
        return not self.block_hashes

    def forget_progress(self) -> None:
        """Its pages were given back. A stale count would make the next reservation take pages for tokens twice."""
        self.num_computed_tokens = 0
        self.shared_prefix_boundary = 0
