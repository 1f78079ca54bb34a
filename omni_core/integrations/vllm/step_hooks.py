# SPDX-License-Identifier: Apache-2.0
"""What happens around each forward of a stage that has a cache: news before it, rows after it.

The rows are taken between vLLM's `execute_model` and `sample_tokens`, when the batch's order and its counts of computed
tokens are those of this step. A step with draft tokens is handed on after `sample_tokens` only: then it is known which
drafts were accepted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from omni_core.integrations.vllm.accepted_tokens import (
    SampledTokens,
    StopRule,
    fewest_sampled,
    kept_samples,
    num_valid_rows,
)
from omni_core.integrations.vllm.adapter_files import AdapterFiles
from omni_core.integrations.vllm.chosen_layers import ChosenLayers
from omni_core.integrations.vllm.delivery.builder import BuiltStep, StageBuilder, StartedRequest
from omni_core.integrations.vllm.delivery.delivery_log import error_text
from omni_core.integrations.vllm.effective_block import EffectiveBlock, warn_if_first_prompts_cannot_hit
from omni_core.integrations.vllm.errors import StepNotSavedError
from omni_core.integrations.vllm.step_events import SchedulerOutput, step_events
from omni_core.integrations.vllm.versions import (
    StageOutputsModel,
    StepArrays,
    adapters_of_step,
    prompt_token_ids,
    step_arrays,
)
from omni_core.prefix_cache.errors import OmniPrefixCacheUnmatchError, StepTooLargeError
from omni_core.prefix_cache.events import StepEvents, StepLayout
from omni_core.settings.stage_settings import OnError

_LOG = logging.getLogger(__name__)

MAX_FAILED_STEPS_IN_A_ROW = 16
"""So many steps may fail one after the other before the cache is turned off: then it is not the requests'."""

_STEP_ERRORS = (OmniPrefixCacheUnmatchError, StepTooLargeError)
"""What `save_outputs` says of a step it cannot take; nothing was changed, and the next step may be fine. A staging slot
that does not come free is none of them: every further step would wait for one as long."""


class StepCache(Protocol):
    """The part of the cache manager that belongs to the engine thread."""

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
        """Give a saved step up; its rows come with a later step."""
        ...

    def bump_adapter_version(self, adapter_id: int) -> object:
        """An adapter is another one from now on."""
        ...


@dataclass(frozen=True, slots=True)
class _UnsampledStep:
    """A saved step with draft tokens, from its forward to its sampling."""

    step_id: int
    arrays: StepArrays
    may_wait: bool


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


class StepHooks:
    """What happens on the engine thread around each forward of a stage that has a cache.

    With `on_error="isolate"` a step that cannot be saved costs the requests in it, and any other error of ours, or too
    many such steps one after the other, turns the cache off for good. With `"raise"` the error stops the engine's step.
    """

    def __init__(
        self,
        cache: StepCache,
        builder: StageBuilder,
        current: CurrentStep,
        *,
        group_index: int,
        on_error: OnError,
        stage_outputs: StageOutputsModel | None,
        layers: ChosenLayers,
        stop_rule: StopRule,
        first_prompts_block: EffectiveBlock | None,
        adapter_files: AdapterFiles,
    ) -> None:
        self._cache = cache
        self._builder = builder
        self._current = current
        self._group_index = group_index
        self._on_error = on_error
        self._stage_outputs = stage_outputs
        self._layers = layers
        self._stop_rule = stop_rule
        self._first_prompts_block = first_prompts_block
        self._failed_in_a_row = 0
        self._steps_failed = 0
        self._off_reason: str | None = None
        self._unsampled: _UnsampledStep | None = None
        self._adapter_files = adapter_files

    @property
    def off_reason(self) -> str | None:
        """Why the cache was turned off, if it was."""
        return self._off_reason

    @property
    def steps_failed(self) -> int:
        """Steps that could not be saved."""
        return self._steps_failed

    def start_over(self) -> None:
        """The cache was reset between two steps: requests open now get no more rows, and a cache that was off is on."""
        self._unsampled = None
        self._failed_in_a_row = 0
        self._off_reason = None
        self._builder.fail_open_requests("the cache was reset")

    def before_forward(self, runner: Any, scheduler_output: SchedulerOutput) -> None:
        """Tell the cache and the builder what the step starts with.

        Waits for no other thread. With adapters whose `load_inplace` is set, and in a step that loads an adapter, it
        asks the file system for the entries of their folders, as vLLM then reads the files themselves.
        """
        if self._off_reason is None:
            self._guarded("new_step_starts", lambda: self._begin(runner, scheduler_output))
        if self._off_reason is not None and scheduler_output.scheduled_new_reqs:
            # Each request has its last word all the same: why it has no rows.
            self._fail_new_requests(scheduler_output, f"the cache was turned off: {self._off_reason}")

    def after_forward(self, runner: Any, scheduler_output: SchedulerOutput) -> None:
        """Save the rows of the forward that has just run, if one ran and this rank has its outputs.

        Blocks only if the builder or the copies to host fall behind, or a sink that is waited for
        (`on_slow_sink="wait"`); for each at most `staging_claim_timeout_s`, once until that moves again.
        """
        state = runner.execute_model_state
        if state is not None:
            self._guarded("save_outputs", lambda: self._save_or_fail(runner, state.hidden_states, scheduler_output))

    def after_sampling(self, runner: Any, output: Any) -> None:
        """Hand on the step whose drafts have just been accepted or rejected, if there is one. Never blocks.

        Args:
            runner: the model runner.
            output: what its `sample_tokens` returned.
        """
        if self._unsampled is not None:
            self._guarded("after_sampling", lambda: self._hand_on_sampled(runner, output))

    def _hand_on_sampled(self, runner: Any, output: SampledTokens) -> None:
        if self._unsampled is not None:
            step, self._unsampled = self._unsampled, None
            self._hand_on(step, kept_samples(runner, output, step.arrays, self._stop_rule))

    def _begin(self, runner: Any, scheduler_output: SchedulerOutput) -> None:
        if self._unsampled is not None:
            # Its sampling failed: only the rows before its drafts are known to be right.
            step, self._unsampled = self._unsampled, None
            self._hand_on(step, fewest_sampled(step.arrays))
        if runner.lora_config is not None:
            adapters = adapters_of_step(runner, scheduler_output)
            if adapters:
                for adapter_id in self._adapter_files.changed(adapters, runner.list_loras()):
                    self._cache.bump_adapter_version(adapter_id)
        self._cache.new_step_starts(step_events(scheduler_output, self._group_index))
        self._tell_builder(scheduler_output)

    def _fail_new_requests(self, scheduler_output: SchedulerOutput, reason: str) -> None:
        ids = [new.req_id for new in scheduler_output.scheduled_new_reqs]
        self._builder.news([StartedRequest(req_id, None, 0) for req_id in ids], scheduler_output.finished_req_ids)
        self._builder.fail_open_requests(reason)

    def _tell_builder(self, scheduler_output: SchedulerOutput) -> None:
        started = [
            StartedRequest(new.req_id, prompt_token_ids(new), new.num_computed_tokens)
            for new in scheduler_output.scheduled_new_reqs
        ]
        if started and self._first_prompts_block is not None:
            block, self._first_prompts_block = self._first_prompts_block, None
            warn_if_first_prompts_cannot_hit(block, started)
        self._builder.news(started, scheduler_output.finished_req_ids)

    def _save_or_fail(self, runner: Any, hidden_states: torch.Tensor, scheduler_output: SchedulerOutput) -> None:
        try:
            self._save(runner, hidden_states, scheduler_output)
        except StepNotSavedError as error:
            self._steps_failed += 1
            self._failed_in_a_row += 1
            if self._on_error is OnError.RAISE or self._failed_in_a_row > MAX_FAILED_STEPS_IN_A_ROW:
                raise
            self._builder.fail_requests(
                list(scheduler_output.num_scheduled_tokens), f"a step of it was not saved: {error}"
            )

    def _save(self, runner: Any, hidden_states: torch.Tensor, scheduler_output: SchedulerOutput) -> None:
        try:
            arrays = step_arrays(runner, scheduler_output, self._group_index)
            outputs = {} if self._stage_outputs is None else self._stage_outputs.take_stage_outputs()
            if not isinstance(outputs, Mapping):
                raise TypeError(f"take_stage_outputs() returned a {type(outputs).__name__}, not a mapping of outputs")
            outputs = self._layers.added_to(outputs, runner.execute_model_state)
        except Exception as error:
            raise StepNotSavedError(f"its outputs could not be taken: {error_text(error)}") from error
        self._current.set(arrays)
        may_wait = self._builder.room_for_step()
        try:
            step_id = self._cache.save_outputs(
                hidden_states,
                outputs,
                num_tokens_unpadded=scheduler_output.total_num_scheduled_tokens,
                num_tokens_padded=hidden_states.shape[0],
                carry_owed=may_wait,
            )
        except _STEP_ERRORS as error:
            raise StepNotSavedError(error_text(error)) from error
        self._failed_in_a_row = 0
        saved = _UnsampledStep(step_id, arrays, may_wait)
        if arrays.num_draft_tokens is None:
            self._hand_on(saved, None)
        else:
            self._unsampled = saved

    def _hand_on(self, saved: _UnsampledStep, sampled_counts: Mapping[str, int] | None) -> None:
        valid = saved.arrays
        if sampled_counts is not None:
            valid = saved.arrays.first_rows(num_valid_rows(saved.arrays, sampled_counts))
        step = BuiltStep(
            saved.step_id, valid.req_ids, valid.starts, valid.positions, valid.token_ids, sampled_counts=sampled_counts
        )
        if saved.may_wait:
            self._builder.submit(step)
        else:
            self._cache.discard_step(saved.step_id, sampled_counts)
            self._builder.give_up(step)

    def _guarded(self, call: str, action: Callable[[], None]) -> None:
        if self._off_reason is not None:
            return
        try:
            action()
        except Exception as error:
            if self._on_error is OnError.RAISE:
                raise
            self._off_reason = f"{call}: {error_text(error)}"
            self._unsampled = None
            _LOG.exception(
                "Omni Core is off for this stage from here on; generation goes on without it (on_error='isolate'). "
                "Cause: %s",
                self._off_reason,
            )
            self._builder.fail_open_requests(f"the cache was turned off: {self._off_reason}")
