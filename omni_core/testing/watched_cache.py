# SPDX-License-Identifier: Apache-2.0
"""A stage cache that tells which step a call belongs to, so that bytes of pinned memory can be told to be a step's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from omni_core.prefix_cache.events import StepEvents
from omni_core.prefix_cache.outputs import PartialRequest, StageCacheOutputs
from omni_core.testing.stage_cache import StageCache


class StepListener(Protocol):
    """Hears of the life of steps, on the thread that calls."""

    def save_begins(self, *, stored: bool) -> None:
        """The calling thread begins to save a step."""

    def save_ended(self, step_id: int | None) -> None:
        """It has; `None`: with an exception."""

    def consume_begins(self, step_id: int) -> None:
        """The calling thread begins to materialise or discard a step."""

    def consume_ended(self, step_id: int) -> None:
        """It has, or the call raised."""


class WatchedCache:
    """Passes every call on.

    Args:
        inner: the cache.
        listener: told of the calls.
        stores_hidden: whether hidden rows of a saved step go into the pool from its staging page.
    """

    def __init__(self, inner: StageCache, listener: StepListener, *, stores_hidden: bool) -> None:
        self._inner = inner
        self._listener = listener
        self._stores_hidden = stores_hidden

    def new_step_starts(self, events: StepEvents) -> None:
        self._inner.new_step_starts(events)

    def save_outputs(
        self,
        hidden: torch.Tensor | None,
        mm_outputs: Mapping[str, Any],
        *,
        num_tokens_unpadded: int,
        num_tokens_padded: int,
        **options: Any,
    ) -> int:
        self._listener.save_begins(stored=self._stores_hidden and hidden is not None)
        step_id = None
        try:
            step_id = self._inner.save_outputs(
                hidden,
                mm_outputs,
                num_tokens_unpadded=num_tokens_unpadded,
                num_tokens_padded=num_tokens_padded,
                **options,
            )
        finally:
            self._listener.save_ended(step_id)
        return step_id

    def materialize(
        self, step_id: int, req_ids: Sequence[str], sampled_counts: Mapping[str, int] | None = None
    ) -> StageCacheOutputs:
        self._listener.consume_begins(step_id)
        try:
            return self._inner.materialize(step_id, req_ids, sampled_counts)
        finally:
            self._listener.consume_ended(step_id)

    def discard_step(self, step_id: int, *counts: Mapping[str, int] | None) -> None:
        self._listener.consume_begins(step_id)
        try:
            self._inner.discard_step(step_id, *counts)
        finally:
            self._listener.consume_ended(step_id)

    def take_partial_requests(self) -> tuple[PartialRequest, ...]:
        return self._inner.take_partial_requests()

    def bump_weight_version(self) -> object:
        return self._inner.bump_weight_version()

    def bump_adapter_version(self, adapter_id: int) -> object:
        return self._inner.bump_adapter_version(adapter_id)
