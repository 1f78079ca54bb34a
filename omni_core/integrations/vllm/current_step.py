# SPDX-License-Identifier: Apache-2.0
"""What of the cache belongs to the engine thread, and the layout of the step it is about to save."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch

from omni_core.integrations.vllm.runners.step_arrays import StepArrays
from omni_core.prefix_cache.events import StepEvents, StepLayout


class StepCache(Protocol):
    """The part of the cache manager that the hooks use: on the engine thread, but for `discard_step`."""

    def new_step_starts(self, events: StepEvents) -> None:
        """Once per step, before its forward."""
        ...

    def save_outputs(
        self,
        hidden: torch.Tensor | None,
        mm_outputs: Mapping[str, Any],
        *,
        num_tokens_unpadded: int,
        num_tokens_padded: int,
        carry_owed: bool = True,
    ) -> int:
        """After the forward; the step's id."""
        ...

    def discard_step(self, step_id: int, sampled_counts: Mapping[str, int] | None = None) -> None:
        """Give a saved step up; its rows come with a later step. Any thread."""
        ...

    def bump_adapter_version(self, adapter_id: int) -> object:
        """An adapter is another one from now on."""
        ...


class CurrentStep:
    """Holds the layout of the step that is being saved. Engine thread only."""

    def __init__(self) -> None:
        self._layout = StepLayout((), np.zeros(1, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64))

    def set(self, arrays: StepArrays) -> None:
        """The step that `save_outputs` is about to be called for."""
        self._layout = StepLayout(
            arrays.req_ids, arrays.starts, arrays.positions, arrays.slots, arrays.num_draft_tokens
        )

    def layout(self) -> StepLayout:
        """The manager's `layout_source`."""
        return self._layout
