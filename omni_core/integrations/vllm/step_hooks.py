# SPDX-License-Identifier: Apache-2.0
"""What happens around each forward of a stage that has a cache: news before it, rows after it.

The rows are taken between vLLM's `execute_model` and `sample_tokens`, when the batch's order and its counts of computed
tokens are those of this step. A step with draft tokens is handed on after `sample_tokens` only: then it is known which
drafts were accepted. Where the engine goes on before sampled tokens are known, every step is handed on when its output
is complete, by whoever completes it; until then nothing that comes after it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from omni_core.integrations.vllm.accepted_tokens import OutputEnd, SampledTokens, StopRule, kept_samples
from omni_core.integrations.vllm.adapter_files import AdapterFiles
from omni_core.integrations.vllm.async_outputs import AsyncOutput, observe_output
from omni_core.integrations.vllm.chosen_layers import ChosenLayers
from omni_core.integrations.vllm.current_step import CurrentStep, StepCache
from omni_core.integrations.vllm.delivery.builder import StageBuilder, StartedRequest
from omni_core.integrations.vllm.delivery.delivery_log import error_text
from omni_core.integrations.vllm.effective_block import EffectiveBlock, warn_if_first_prompts_cannot_hit
from omni_core.integrations.vllm.errors import StepNotSavedError
from omni_core.integrations.vllm.outbox import Outbox
from omni_core.integrations.vllm.runners.runner_view import RunnerView
from omni_core.integrations.vllm.saved_steps import SavedStep, SavedSteps
from omni_core.integrations.vllm.step_events import SchedulerOutput, step_events
from omni_core.integrations.vllm.versions import StageOutputsModel, prompt_token_ids
from omni_core.prefix_cache.errors import OmniPrefixCacheUnmatchError, StepTooLargeError
from omni_core.settings.stage_settings import OnError

_LOG = logging.getLogger(__name__)

MAX_FAILED_STEPS_IN_A_ROW = 16
"""So many steps may fail one after the other before the cache is turned off: then it is not the requests'."""

_STEP_ERRORS = (OmniPrefixCacheUnmatchError, StepTooLargeError)
"""What `save_outputs` says of a step it cannot take; nothing was changed, and the next step may be fine. A staging slot
that does not come free is none of them: every further step would wait for one as long."""


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
        view: RunnerView,
        outbox: Outbox,
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
        self._view = view
        self._outbox = outbox
        self._steps = SavedSteps(cache, builder, outbox)
        self._group_index = group_index
        self._on_error = on_error
        self._stage_outputs = stage_outputs
        self._layers = layers
        self._stop_rule = stop_rule
        self._first_prompts_block = first_prompts_block
        self._failed_in_a_row = 0
        self._steps_failed = 0
        self._off_reason: str | None = None
        self._unsampled: SavedStep | None = None
        self._adapter_files = adapter_files
        self._warming_up = False

    @property
    def off_reason(self) -> str | None:
        """Why the cache was turned off, if it was."""
        return self._off_reason

    @property
    def steps_failed(self) -> int:
        """Steps that could not be saved."""
        return self._steps_failed

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        """While this is entered the engine runs requests of its own making: they are none of ours."""
        self._warming_up = True
        try:
            yield
        finally:
            self._warming_up = False

    def is_real_step(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether `execute_model`, called with these arguments behind the scheduler output, runs clients' requests."""
        return not self._warming_up and not self._view.is_dummy_run(args, kwargs)

    def start_over(self) -> None:
        """The cache was reset between two steps: requests open now get no more rows, and a cache that was off is on."""
        self._unsampled = None
        self._failed_in_a_row = 0
        self._off_reason = None
        self._outbox.clear()
        self._builder.fail_open_requests("the cache was reset")

    def before_forward(self, runner: Any, scheduler_output: SchedulerOutput) -> None:
        """Tell the cache and the builder what the step starts with.

        Waits for no other thread. With adapters whose `load_inplace` is set, and in a step that loads an adapter, it
        asks the file system for the entries of their folders, as vLLM then reads the files themselves.
        """
        # Also while the cache is off: it may be turned on again.
        self._attempt("step_begins", partial(self._view.step_begins, scheduler_output))
        self._guarded("new_step_starts", lambda: self._begin(runner, scheduler_output))
        if self._off_reason is not None and scheduler_output.scheduled_new_reqs:
            # Each request has its last word all the same: why it has no rows. A step that was being saved while another
            # thread turned the cache off would stand in front of it for ever.
            self._outbox.clear()
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
        """Hand on the step that has just been sampled, now or when its output is complete. Never blocks.

        Args:
            runner: the model runner.
            output: what its `sample_tokens` returned.
        """
        if self._unsampled is not None:
            self._guarded("after_sampling", lambda: self._hand_on_sampled(runner, output))

    def _hand_on_sampled(self, runner: Any, output: Any) -> None:
        if self._unsampled is None or output is None:
            return
        step, self._unsampled = self._unsampled, None
        if isinstance(output, AsyncOutput):
            observe_output(output, partial(self._output_complete, step))
        else:
            self._steps.hand_on(step, kept_samples(runner, output, step.arrays, self._stop_rule))

    def _output_complete(self, step: SavedStep, output: SampledTokens | None) -> None:
        """On the thread that completed it."""
        if output is None:
            self._guarded("get_output", partial(self._steps.hand_on_unsampled, step))
        else:
            self._guarded("get_output", partial(self._steps.hand_on_complete, step, output))

    def _begin(self, runner: Any, scheduler_output: SchedulerOutput) -> None:
        if self._unsampled is not None:
            step, self._unsampled = self._unsampled, None
            self._steps.hand_on_unsampled(step)
        if runner.lora_config is not None:
            adapters = self._view.adapters_of_step(runner, scheduler_output)
            if adapters:
                for adapter_id in self._adapter_files.changed(adapters, runner.list_loras()):
                    self._cache.bump_adapter_version(adapter_id)
        self._cache.new_step_starts(step_events(scheduler_output, self._group_index))
        self._tell_builder(runner, scheduler_output)

    def _fail_new_requests(self, scheduler_output: SchedulerOutput, reason: str) -> None:
        started = [StartedRequest(new.req_id, None, 0) for new in scheduler_output.scheduled_new_reqs]
        self._outbox.put(partial(self._builder.news, started, tuple(scheduler_output.finished_req_ids)))
        self._outbox.put(partial(self._builder.fail_open_requests, reason))

    def _tell_builder(self, runner: Any, scheduler_output: SchedulerOutput) -> None:
        started = [
            StartedRequest(new.req_id, prompt_token_ids(new), new.num_computed_tokens, self._output_end(runner, new))
            for new in scheduler_output.scheduled_new_reqs
        ]
        if started and self._first_prompts_block is not None:
            block, self._first_prompts_block = self._first_prompts_block, None
            warn_if_first_prompts_cannot_hit(block, started)
        self._outbox.put(partial(self._builder.news, started, tuple(scheduler_output.finished_req_ids)))

    def _output_end(self, runner: Any, new: Any) -> OutputEnd | None:
        if not self._view.tokens_come_later:
            return None
        return OutputEnd(new.sampling_params, self._stop_rule, runner.max_model_len)

    def _save_or_fail(self, runner: Any, hidden_states: torch.Tensor, scheduler_output: SchedulerOutput) -> None:
        try:
            self._save(runner, hidden_states, scheduler_output)
        except StepNotSavedError as error:
            self._steps_failed += 1
            self._failed_in_a_row += 1
            if self._on_error is OnError.RAISE or self._failed_in_a_row > MAX_FAILED_STEPS_IN_A_ROW:
                raise
            req_ids, reason = tuple(scheduler_output.num_scheduled_tokens), f"a step of it was not saved: {error}"
            self._outbox.put(partial(self._builder.fail_requests, req_ids, reason))

    def _save(self, runner: Any, hidden_states: torch.Tensor, scheduler_output: SchedulerOutput) -> None:
        try:
            arrays = self._view.arrays(runner, scheduler_output)
            outputs = {} if self._stage_outputs is None else self._stage_outputs.take_stage_outputs()
            if not isinstance(outputs, Mapping):
                raise TypeError(f"take_stage_outputs() returned a {type(outputs).__name__}, not a mapping of outputs")
            outputs = self._layers.added_to(outputs, runner.execute_model_state)
        except Exception as error:
            raise StepNotSavedError(f"its outputs could not be taken: {error_text(error)}") from error
        self._current.set(arrays)
        may_wait = self._builder.room_for_step(num_held=self._outbox.num_held)
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
        held = self._outbox.hold() if self._view.tokens_come_later else None
        saved = SavedStep(step_id, arrays, may_wait, held)
        if held is None and arrays.num_draft_tokens is None:
            self._steps.hand_on(saved, {})
        else:
            self._unsampled = saved

    def _guarded(self, call: str, action: Callable[[], None]) -> None:
        if self._off_reason is None:
            self._attempt(call, action)

    def _attempt(self, call: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            if self._on_error is OnError.RAISE:
                raise
            if self._off_reason is not None:
                return
            self._off_reason = f"{call}: {error_text(error)}"
            self._unsampled = None
            self._outbox.clear()
            _LOG.exception(
                "Omni Core is off for this stage from here on; generation goes on without it (on_error='isolate'). "
                "Cause: %s",
                self._off_reason,
            )
            self._builder.fail_open_requests(f"the cache was turned off: {self._off_reason}")
