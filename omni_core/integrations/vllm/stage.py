# SPDX-License-Identifier: Apache-2.0
"""Opens a stage when its KV cache is made: asks the gate, builds the parts, lets the runner adopt the hooks.

The same for every platform; a platform's worker class calls it and adds nothing.
"""

from __future__ import annotations

import logging
from typing import Any

from omni_core.integrations.vllm.runner_hooks import adopt_hooks
from omni_core.integrations.vllm.session import StageParts, StageSession
from omni_core.integrations.vllm.settings import OmniSettings
from omni_core.integrations.vllm.stage_facts import GROUP_INDEX, cache_config, decide, stage_facts
from omni_core.integrations.vllm.tap import install_tap
from omni_core.integrations.vllm.versions import (
    attention_group_kinds,
    block_table_block_size,
    engine_version,
    is_output_rank,
    request_ids_are_randomised,
)
from omni_core.prefix_cache.gate import GateStatus
from omni_core.prefix_cache.policy import ModelCachePolicy
from omni_core.runtime import ThreadingRuntime

_LOG = logging.getLogger(__name__)


def open_stage(
    settings: OmniSettings, vllm_config: Any, kv_cache_config: Any, runner: Any, *, uses_v2_runner: bool
) -> StageSession:
    """Open the stage of one worker. Once, after vLLM's own KV-cache initialisation, on the engine thread.

    A stage the gate ignores keeps its runner as it is. The rank's distributed groups must exist.

    Raises:
        GateRefusedError: the gate refuses.
        BackendError, SinkError, OmniPrefixCacheError: a part cannot be made.
    """
    facts = stage_facts(
        settings,
        vllm_config,
        is_output_rank=is_output_rank(),
        is_pooling=bool(runner.is_pooling_model),
        attention_group_kinds=attention_group_kinds(kv_cache_config),
        block_table_block_size=None if uses_v2_runner else block_table_block_size(runner, GROUP_INDEX),
        engine_version=engine_version(),
        uses_v2_runner=uses_v2_runner,
    )
    decision = decide(facts)
    parts: StageParts | None = None
    if decision.status is GateStatus.SUPPORTED:
        model = runner.get_model()
        policy = ModelCachePolicy.from_model(model)
        config = cache_config(
            settings,
            vllm_config,
            num_blocks=kv_cache_config.num_blocks,
            block_size=block_table_block_size(runner, GROUP_INDEX),
        )
        parts = StageParts(
            settings,
            config,
            policy,
            model=model,
            device=runner.device,
            request_ids_randomised=request_ids_are_randomised(),
            runtime=ThreadingRuntime(),
        )
        adopt_hooks(runner, parts.hooks)
        _LOG.info(
            "Omni Core is on: %d blocks of %d tokens, hidden rows of %d bytes, sink %r, backend %r",
            config.num_blocks,
            config.block_size,
            config.hidden_row_bytes,
            settings.sink,
            parts.backend.name,
        )
    else:
        _LOG.info("Omni Core is off here (%s): %s", decision.rule, decision.reason)
    tap = install_tap(runner) if settings.tap and not uses_v2_runner else None
    return StageSession(settings, decision, parts=parts, tap=tap)
