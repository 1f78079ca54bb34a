# SPDX-License-Identifier: Apache-2.0
"""What the hooks ask of a model runner, whatever its kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from omni_core.integrations.vllm.runners.step_arrays import StepArrays
from omni_core.integrations.vllm.step_events import SchedulerOutput


class RunnerView(Protocol):
    """How one kind of model runner is read. Engine thread; one per stage."""

    @property
    def tokens_come_later(self) -> bool:
        """Whether a step's sampled tokens may become known after the next step has begun.

        Then `sample_tokens` returns an output whose `get_output` is called later, perhaps on another thread.
        """
        ...

    def is_dummy_run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether `execute_model` was called, with these arguments behind the scheduler output, for no real request."""
        ...

    def step_begins(self, scheduler_output: SchedulerOutput) -> None:
        """Take in a step's news before the runner does. Every real step, also while the cache is off."""
        ...

    def adapters_of_step(self, runner: Any, scheduler_output: SchedulerOutput) -> list[Any]:
        """The `LoRARequest`s of the requests a step is about to run, before the runner has taken its news in.

        Of requests that it knows, and that end or pause with this step, too.
        """
        ...

    def arrays(self, runner: Any, scheduler_output: SchedulerOutput) -> StepArrays:
        """The batch of the forward that has just run. Between `execute_model` and `sample_tokens`; waits for nothing.

        Raises:
            RowsBeyondTableError: a request has a row beyond its blocks.
            BlockTableMismatchError: what is known of the batch's blocks is not what the runner used.
        """
        ...
