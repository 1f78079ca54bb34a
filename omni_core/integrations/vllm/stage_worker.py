# SPDX-License-Identifier: Apache-2.0
"""What every worker class of Omni Core adds to vLLM's: the one place where the gate is asked and a stage is opened.

A platform's worker class is this mixin in front of that platform's own worker, and nothing else.
"""

from __future__ import annotations

import logging
import os
from contextlib import nullcontext
from typing import Any, cast

from omni_core.integrations.vllm.changed_weights import ChangedWeightsMixin
from omni_core.integrations.vllm.chosen_layers import capture_layers
from omni_core.integrations.vllm.rpc.worker_calls import WorkerCalls, answer
from omni_core.integrations.vllm.stage import check_stage, open_stage
from omni_core.integrations.vllm.versions import adopt_engine_logging
from omni_core.settings.resolve import stage_settings

_LOG = logging.getLogger(__name__)


class StageWorkerMixin(ChangedWeightsMixin):
    """Put in front of a worker class of vLLM. Its methods are called by the engine, on the worker's main thread."""

    # vLLM's own, of the worker class behind this one.
    vllm_config: Any
    use_v2_model_runner: bool | None

    def init_device(self) -> None:
        """Run vLLM's own, after settings and gate were asked: what is wrong stops before anything is loaded.

        Raises:
            SettingsError: settings that cannot be run with, wherever they were given.
            GateRefusedError: vLLM's configuration alone says that rows would be wrong.
        """
        adopt_engine_logging()
        self.omni_core_resolved = stage_settings(self.vllm_config.additional_config, os.environ)
        self.omni_core_settings = self.omni_core_resolved.stage()
        _LOG.info("Omni Core settings that are not defaults: %s", self.omni_core_resolved.given())
        check_stage(self.omni_core_settings, self.vllm_config, uses_v2_runner=bool(self.use_v2_model_runner))
        self.omni_core_calls = WorkerCalls(None)
        cast("Any", super()).init_device()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Run vLLM's own; then the model is told which layers to hand out, if any were chosen.

        Raises:
            SettingsError: the model cannot hand out its layers.
        """
        cast("Any", super()).load_model(*args, **kwargs)
        capture_layers(self.omni_core_settings, self.model_runner)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Run vLLM's own; then the gate is asked and the stage gets its cache.

        Raises:
            GateRefusedError: a cache was asked for that cannot give right rows here.
        """
        cast("Any", super()).initialize_from_config(kv_cache_config)
        if self.omni_core_session is not None:
            self.omni_core_session.close()
        self.omni_core_session = open_stage(
            self.omni_core_resolved,
            self.vllm_config,
            kv_cache_config,
            self.model_runner,
            self.omni_core_adapter_files,
            uses_v2_runner=bool(self.use_v2_model_runner),
        )
        self.omni_core_calls = WorkerCalls(self.omni_core_session)

    def compile_or_warm_up_model(self) -> Any:
        """Run vLLM's own. The requests that the second model runner is warmed up with are none of a client's."""
        with self.omni_core_session.warming_up() if self.omni_core_session is not None else nullcontext():
            return cast("Any", super()).compile_or_warm_up_model()

    def omni_core_flush(self, /, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """`WorkerCalls.flush`, for `collective_rpc("omni_core_flush")`: hands on what was computed and ends nothing."""
        return answer(self.omni_core_calls.flush, args, kwargs)

    def omni_core_find(self, /, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """`WorkerCalls.find`, for `collective_rpc("omni_core_find", args=(request_id,))`."""
        return answer(self.omni_core_calls.find, args, kwargs)

    def omni_core_read(self, /, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """`WorkerCalls.read`, for `collective_rpc("omni_core_read", args=(req_id, use, offset))`."""
        return answer(self.omni_core_calls.read, args, kwargs)

    def omni_core_forget(self, /, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """`WorkerCalls.forget`, for `collective_rpc("omni_core_forget", args=(req_id, use))`."""
        return answer(self.omni_core_calls.forget, args, kwargs)

    def omni_core_reset(self, /, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """`WorkerCalls.reset`, for `collective_rpc("omni_core_reset")`: forgets every row and request."""
        return answer(self.omni_core_calls.reset, args, kwargs)

    def omni_core_bump(self, /, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """`WorkerCalls.bump`, for `collective_rpc("omni_core_bump")`: the weights, or an adapter, have changed."""
        return answer(self.omni_core_calls.bump, args, kwargs)

    def omni_core_report(self, /, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """`WorkerCalls.report`, for `collective_rpc("omni_core_report")`."""
        return answer(self.omni_core_calls.report, args, kwargs)

    def shutdown(self) -> None:
        """Close the session in bounded time, then vLLM's own."""
        try:
            if self.omni_core_session is not None:
                self.omni_core_session.close()
        finally:
            cast("Any", super()).shutdown()
