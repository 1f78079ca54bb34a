# SPDX-License-Identifier: Apache-2.0
"""How a model runner adopts the hooks of a stage. No method body of vLLM is copied.

vLLM 0.32 runs a step in two calls: `execute_model` computes and returns `None`, leaving what it computed in
`execute_model_state`, and `sample_tokens` uses that up. Profile, dummy and warm-up runs never reach the cache.
"""

from __future__ import annotations

from typing import Any, cast

from omni_core.integrations.vllm.step_events import SchedulerOutput
from omni_core.integrations.vllm.step_hooks import StepHooks


class RunnerHooksMixin:
    """Put in front of a runner's own class by `adopt_hooks`."""

    omni_core_hooks: StepHooks

    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        """Run vLLM's `execute_model`, with the hooks around it."""
        is_real_step = self.omni_core_hooks.is_real_step(args, kwargs)
        if is_real_step:
            self.omni_core_hooks.before_forward(self, scheduler_output)
        # The runner's own class comes next in the order of base classes, which this class alone cannot know.
        result = cast("Any", super()).execute_model(scheduler_output, *args, **kwargs)
        if is_real_step:
            self.omni_core_hooks.after_forward(self, scheduler_output)
        return result

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Run vLLM's `sample_tokens`; then, or when its output is complete, the rows of accepted drafts are known."""
        output = cast("Any", super()).sample_tokens(*args, **kwargs)
        self.omni_core_hooks.after_sampling(self, output)
        return output


def adopt_hooks(runner: Any, hooks: StepHooks) -> None:
    """Let a runner adopt the hooks: its class becomes one made from the mixin and its own. While no request runs.

    A runner that has hooks already, from a KV cache made before, gets these in their place.
    """
    if isinstance(runner, RunnerHooksMixin):
        runner.omni_core_hooks = hooks
        return
    own = type(runner)
    runner.__class__ = type(f"OmniCore{own.__name__}", (RunnerHooksMixin, own), {"__doc__": own.__doc__})
    runner.omni_core_hooks = hooks
