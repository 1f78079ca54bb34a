# SPDX-License-Identifier: Apache-2.0
"""What the engine thread hands to the builder, and what the builder asks of the cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from omni_core.prefix_cache.outputs import StageCacheOutputs


class FindsEnd(Protocol):
    """Tells which of a request's sampled tokens ends it."""

    def first_end(
        self, sampled: Sequence[int], *, num_prompt_tokens: int, num_before: int, before: Callable[[], Sequence[int]]
    ) -> int | None:
        """Index of the first sampled token that ends the request; `None`: it goes on."""
        ...


class StepSource(Protocol):
    """The part of the cache manager that the builder uses. Every method may be called from any thread."""

    def materialize(
        self, step_id: int, req_ids: Sequence[str], sampled_counts: Mapping[str, int] | None = None
    ) -> StageCacheOutputs:
        """Every row a step owes these requests; blocks until they lie in host memory, in bounded time."""
        ...


@dataclass(frozen=True, slots=True)
class StartedRequest:
    """A request the engine scheduled for the first time, or a further piece of a session's prompt."""

    req_id: str
    prompt_token_ids: Sequence[int] | None
    num_skipped_tokens: int
    output_end: FindsEnd | None = None
    """Set where steps come with what they sampled (`BuiltStep.sampled`)."""


@dataclass(frozen=True, slots=True)
class SampledStep:
    """What a step sampled, where the engine's next step began before that was known."""

    first_positions: npt.NDArray[np.int64]
    """`(num_reqs,)`: where the first token sampled for each request stands."""
    token_ids: tuple[tuple[int, ...], ...]
    """Per request, in batch order; empty where nothing was sampled, as in the middle of a prompt."""


@dataclass(frozen=True, slots=True)
class BuiltStep:
    """A step that was saved: batch order, one entry per real row. The arrays are the builder's to keep."""

    step_id: int
    req_ids: tuple[str, ...]
    starts: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    token_ids: npt.NDArray[np.int64]
    sampled_counts: Mapping[str, int] | None = None
    """For each request with draft tokens, how many of its sampled tokens count; rows of the others are left out above.
    `None`: the step has no drafts."""
    sampled: SampledStep | None = None
    """What it sampled; the tokens of later steps are then known from here."""
