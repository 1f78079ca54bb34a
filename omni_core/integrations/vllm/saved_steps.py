# SPDX-License-Identifier: Apache-2.0
"""Hands saved steps on to the builder: now, or when their outputs are complete, and always in the engine's order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from omni_core.integrations.vllm.accepted_tokens import (
    SampledTokens,
    accepted_samples,
    fewest_sampled,
    num_valid_rows,
    sampled_tokens,
)
from omni_core.integrations.vllm.current_step import StepCache
from omni_core.integrations.vllm.delivery.builder import BuiltStep, StageBuilder
from omni_core.integrations.vllm.delivery.built_step import SampledStep
from omni_core.integrations.vllm.outbox import Held, Outbox
from omni_core.integrations.vllm.runners.step_arrays import StepArrays


@dataclass(frozen=True, slots=True)
class SavedStep:
    """A saved step, until it is handed on."""

    step_id: int
    arrays: StepArrays
    may_wait: bool
    """Whether the builder had room for it. If not, it is given up and its rows come with a later step."""
    held: Held | None = None
    """Its place in the outbox, if its tokens come later."""


class SavedSteps:
    """Hands steps on. Any thread; never waits."""

    def __init__(self, cache: StepCache, builder: StageBuilder, outbox: Outbox) -> None:
        self._cache = cache
        self._builder = builder
        self._outbox = outbox

    def hand_on(self, saved: SavedStep, sampled_counts: Mapping[str, int]) -> None:
        """Hand a step on whose tokens the runner knows; `sampled_counts` of its requests with drafts."""
        self._hand_on(saved, sampled_counts, None)

    def hand_on_complete(self, saved: SavedStep, output: SampledTokens) -> None:
        """Hand a step on whose output has just become complete."""
        sampled = SampledStep(saved.arrays.first_sampled_positions, sampled_tokens(output, saved.arrays))
        self._hand_on(saved, accepted_samples(output, saved.arrays), sampled)

    def hand_on_unsampled(self, saved: SavedStep) -> None:
        """Hand a step on whose sampling failed: only the rows before its drafts are known to be right."""
        nothing = None
        if saved.held is not None:
            nothing = SampledStep(saved.arrays.first_sampled_positions, ((),) * len(saved.arrays.req_ids))
        self._hand_on(saved, fewest_sampled(saved.arrays), nothing)

    def _hand_on(self, saved: SavedStep, sampled_counts: Mapping[str, int], sampled: SampledStep | None) -> None:
        valid = saved.arrays
        if sampled_counts:
            valid = saved.arrays.first_rows(num_valid_rows(saved.arrays, sampled_counts))
        step = BuiltStep(
            saved.step_id,
            valid.req_ids,
            valid.starts,
            valid.positions,
            valid.token_ids,
            sampled_counts=sampled_counts or None,
            sampled=sampled,
        )
        submit = partial(self._submit, step, may_wait=saved.may_wait)
        if saved.held is None:
            self._outbox.put(submit)
        else:
            self._outbox.release(saved.held, submit)

    def _submit(self, step: BuiltStep, *, may_wait: bool) -> None:
        if may_wait:
            self._builder.submit(step)
        else:
            self._cache.discard_step(step.step_id, step.sampled_counts)
            self._builder.give_up(step)
