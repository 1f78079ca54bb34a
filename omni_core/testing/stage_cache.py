# SPDX-License-Identifier: Apache-2.0
"""The part of a stage cache that the simulator calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from omni_core.prefix_cache.events import StepEvents
from omni_core.prefix_cache.outputs import PartialRequest, StageCacheOutputs


class StageCache(Protocol):
    """What the simulator needs of a cache; `OmniPrefixCacheManager` has it."""

    def new_step_starts(self, events: StepEvents) -> None: ...

    def save_outputs(
        self,
        hidden: torch.Tensor | None,
        mm_outputs: Mapping[str, Any],
        *,
        num_tokens_unpadded: int,
        num_tokens_padded: int,
    ) -> int: ...

    def materialize(
        self, step_id: int, req_ids: Sequence[str], sampled_counts: Mapping[str, int] | None = None
    ) -> StageCacheOutputs: ...

    def discard_step(self, step_id: int, sampled_counts: Mapping[str, int] | None = None) -> None: ...

    def take_partial_requests(self) -> tuple[PartialRequest, ...]: ...

    def bump_weight_version(self) -> object: ...

    def bump_adapter_version(self, adapter_id: int) -> object: ...
