# SPDX-License-Identifier: Apache-2.0
"""What a stage with a cache consists of: backend, sink, cache, builder and hooks, made and closed together."""

from __future__ import annotations

import atexit
import logging
from contextlib import ExitStack
from typing import Any

import torch

from omni_core.backend.base import DeviceBackend
from omni_core.backend.registry import backend_for_tensor
from omni_core.integrations.vllm.accepted_tokens import StopRule
from omni_core.integrations.vllm.adapter_files import AdapterFiles
from omni_core.integrations.vllm.chosen_layers import ChosenLayers
from omni_core.integrations.vllm.current_step import CurrentStep
from omni_core.integrations.vllm.delivery.builder import StageBuilder
from omni_core.integrations.vllm.effective_block import EffectiveBlock
from omni_core.integrations.vllm.outbox import Outbox
from omni_core.integrations.vllm.pretouch_display import pretouch_display
from omni_core.integrations.vllm.request_ids import client_request
from omni_core.integrations.vllm.runners.runner_view import RunnerView
from omni_core.integrations.vllm.step_hooks import StepHooks
from omni_core.integrations.vllm.versions import stage_outputs_model
from omni_core.prefix_cache.config import PrefixCacheConfig
from omni_core.prefix_cache.manager import OmniPrefixCacheManager
from omni_core.prefix_cache.policy import ModelCachePolicy
from omni_core.runtime import Runtime
from omni_core.settings.stage_settings import StageSettings
from omni_core.sinks.base import StageSink
from omni_core.sinks.held_bytes import most_held_bytes
from omni_core.sinks.registry import create_sink

_LOG = logging.getLogger(__name__)

_LEAST_CLOSE_TIMEOUT_S = 0.5
"""What the cache gets to close when the sink took all the time there was."""


class StageParts:
    """What a stage with a cache consists of. Built at KV-cache initialisation, closed once."""

    def __init__(
        self,
        settings: StageSettings,
        config: PrefixCacheConfig,
        policy: ModelCachePolicy,
        *,
        model: Any,
        device: torch.device,
        view: RunnerView,
        group_index: int,
        request_ids_randomised: bool,
        stop_rule: StopRule,
        runtime: Runtime,
        adapter_files: AdapterFiles,
        first_prompts_block: EffectiveBlock | None = None,
    ) -> None:
        """Make backend, sink, cache, builder and hooks, in this order; a failure closes those already made.

        Args:
            settings: the operator's.
            config: the cache's.
            policy: the model's.
            model: the stage's model; asked once whether it hands out further outputs.
            device: where the stage's outputs lie.
            view: how the stage's model runner is read.
            group_index: the KV-cache group that is mirrored.
            request_ids_randomised: whether the engine appends random digits to a client's request id.
            stop_rule: the scheduler's rule for the end of a request.
            runtime: makes every thread, lock and condition.
            adapter_files: what is known of the worker's adapters.
            first_prompts_block: to be warned of if the stage's first prompts are too short to hit.

        Raises:
            BackendError, SinkError, OmniPrefixCacheError: a part cannot be made; says which and why.
        """
        self._runtime = runtime
        self._shutdown_timeout_s = settings.shutdown_timeout_s
        probe = torch.empty(0, device=device)
        with ExitStack() as undo:
            self.backend: DeviceBackend = backend_for_tensor(probe, runtime=runtime, override=settings.backend)
            undo.callback(self.backend.close)
            self.sink: StageSink = create_sink(settings.sink, settings.sink_options)
            undo.callback(self.sink.close)
            current = CurrentStep()
            self.cache = OmniPrefixCacheManager(config, self.backend, current.layout, runtime=runtime, device=device)
            undo.callback(self.cache.close)
            with pretouch_display(runtime) as show:
                self.cache.register_policy(
                    policy,
                    on_pretouch=show,
                    sink_queue_bytes=settings.sink_queue_bytes,
                    sink_bytes=most_held_bytes(settings.sink, settings.sink_options) or 0,
                )
            self.builder = StageBuilder(
                self.cache,
                self.sink,
                runtime=runtime,
                client_request_of=lambda req_id: client_request(req_id, randomised=request_ids_randomised),
                # One staging slot stays free for a step that has to be given up.
                max_open_steps=config.staging_depth - 1,
                room_timeout_s=settings.staging_claim_timeout_s,
                whole_prefix=policy.needs_full_hidden_states,
                bind_thread=self.backend.bind_thread,
                on_slow_sink=settings.on_slow_sink,
                sink_queue_bytes=settings.sink_queue_bytes,
                ids_repeat=not request_ids_randomised,
            )
            undo.callback(self.builder.close, _LEAST_CLOSE_TIMEOUT_S)
            self.hooks = StepHooks(
                self.cache,
                self.builder,
                current,
                view=view,
                outbox=Outbox(runtime),
                group_index=group_index,
                on_error=settings.on_error,
                stage_outputs=stage_outputs_model(model),
                layers=ChosenLayers(settings.captured_layers),
                stop_rule=stop_rule,
                first_prompts_block=first_prompts_block,
                adapter_files=adapter_files,
            )
            undo.pop_all()

    def close_elsewhere(self) -> None:
        """`close` on a thread of its own; returns at once."""
        self._runtime.spawn("omni-core-close", self.close)

    def close(self, timeout_s: float | None = None) -> None:
        """Deliver what was computed, end every request in the sink, close the parts. Idempotent; bounded.

        Args:
            timeout_s: the longest to wait for the sink; `None` is the setting `shutdown_timeout_s`.
        """
        timeout_s = self._shutdown_timeout_s if timeout_s is None else timeout_s
        deadline_s = self._runtime.monotonic_s() + timeout_s
        if not self.builder.close(timeout_s):
            _LOG.error(
                "the sink did not finish within %g s (shutdown_timeout_s) at shutdown; requests it had not finished "
                "are not readable",
                timeout_s,
            )
        self.cache.close(max(_LEAST_CLOSE_TIMEOUT_S, deadline_s - self._runtime.monotonic_s()))
        self.backend.close()
        # Last, so that a process that ends while another thread is in here waits for the sink all the same.
        atexit.unregister(self.close)
