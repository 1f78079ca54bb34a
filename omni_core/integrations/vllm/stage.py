# SPDX-License-Identifier: Apache-2.0
"""Opens a stage when its KV cache is made: asks the gate, builds the parts, lets the runner adopt the hooks.

The same for every platform; a platform's worker class calls it and adds nothing.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from omni_core.integrations.vllm.adapter_files import AdapterFiles
from omni_core.integrations.vllm.chosen_layers import ChosenLayers, check_layers
from omni_core.integrations.vllm.effective_block import effective_block, warn_if_no_prompt_can_hit
from omni_core.integrations.vllm.releases.installed_engine import engine_lacks, engine_version
from omni_core.integrations.vllm.runner_hooks import adopt_hooks
from omni_core.integrations.vllm.runners.choice import block_table_block_size, check_staging, runner_view
from omni_core.integrations.vllm.session import StageSession
from omni_core.integrations.vllm.stage_facts import KvGroups, cache_config, decide, stage_facts
from omni_core.integrations.vllm.stage_parts import StageParts
from omni_core.integrations.vllm.tap import install_tap
from omni_core.integrations.vllm.versions import (
    attention_group_kinds,
    engine_stop_rule,
    is_output_rank,
    prefix_replay_tokens,
    request_ids_are_randomised,
    stage_outputs_model,
)
from omni_core.prefix_cache.gate import GateStatus, full_attention_group
from omni_core.prefix_cache.policy import ModelCachePolicy
from omni_core.runtime import ThreadingRuntime
from omni_core.settings.resolve import ResolvedSettings
from omni_core.settings.stage_settings import StageSettings

_LOG = logging.getLogger(__name__)


def check_stage(settings: StageSettings, vllm_config: Any, *, uses_v2_runner: bool) -> None:
    """Refuse what can be refused from vLLM's configuration alone, before anything is loaded.

    Raises:
        GateRefusedError: the gate refuses.
        SettingsError: layers were asked for that this engine cannot give, or staging slots are too few for it.
    """
    device = str(vllm_config.device_config.device_type)
    decide(
        stage_facts(
            settings,
            vllm_config,
            engine_version=engine_version(),
            engine_lacks=engine_lacks(device, uses_v2_runner=uses_v2_runner) if settings.enabled else (),
            uses_v2_runner=uses_v2_runner,
        )
    )
    if settings.enabled:
        check_staging(settings, vllm_config, uses_v2_runner=uses_v2_runner)
    check_layers(settings, vllm_config)


def open_stage(
    resolved: ResolvedSettings,
    vllm_config: Any,
    kv_cache_config: Any,
    runner: Any,
    adapter_files: AdapterFiles,
    *,
    uses_v2_runner: bool,
) -> StageSession:
    """Open the stage of one worker. Once, after vLLM's own KV-cache initialisation, on the engine thread.

    A stage the gate ignores keeps its runner as it is. The rank's distributed groups must exist.

    Raises:
        GateRefusedError: the gate refuses.
        SettingsError: a chosen layer has the name of an output of the model.
        InvalidConfigError: the model declares a policy that makes no sense.
        BackendError, SinkError, OmniPrefixCacheError: a part cannot be made.
    """
    settings = resolved.stage()
    kinds = attention_group_kinds(kv_cache_config)
    group_index = full_attention_group(kinds)
    groups = KvGroups(kinds, prefix_replay_tokens(kv_cache_config))
    if group_index is not None:
        groups = replace(
            groups,
            allocator_block_size=int(kv_cache_config.kv_cache_groups[group_index].kv_cache_spec.block_size),
            block_table_block_size=block_table_block_size(runner, group_index, uses_v2_runner=uses_v2_runner),
        )
    # A stage that did not ask is left alone, whatever its model declares.
    policy = ModelCachePolicy.from_model(runner.get_model()) if settings.enabled else ModelCachePolicy()
    decision = decide(
        stage_facts(
            settings,
            vllm_config,
            engine_version=engine_version(),
            uses_v2_runner=uses_v2_runner,
            is_output_rank=is_output_rank(),
            kv_groups=groups,
            policy=policy,
            hands_out_outputs=stage_outputs_model(runner.get_model()) is not None,
        )
    )
    parts: StageParts | None = None
    if decision.status is GateStatus.SUPPORTED and group_index is not None and groups.allocator_block_size is not None:
        block = effective_block(kinds, kv_cache_config, vllm_config)
        never_hits = warn_if_no_prompt_can_hit(block, int(vllm_config.model_config.max_model_len))
        config = cache_config(
            settings,
            vllm_config,
            num_blocks=kv_cache_config.num_blocks,
            block_size=groups.allocator_block_size,
        )
        parts = StageParts(
            settings,
            config,
            ChosenLayers(settings.captured_layers).declared_in(policy),
            model=runner.get_model(),
            device=runner.device,
            view=runner_view(vllm_config, group_index, groups.allocator_block_size, uses_v2_runner=uses_v2_runner),
            group_index=group_index,
            request_ids_randomised=request_ids_are_randomised(),
            stop_rule=engine_stop_rule(),
            first_prompts_block=None if never_hits else block,
            runtime=ThreadingRuntime(),
            adapter_files=adapter_files,
        )
        _LOG.info(
            "Omni Core is on: %d blocks of %d tokens, hidden rows of %d bytes, sink %r, backend %r",
            config.num_blocks,
            config.block_size,
            config.hidden_row_bytes,
            settings.sink,
            parts.backend.name,
        )
    else:
        _LOG.info("Omni Core is off here: %s (%s): %s", decision.status.value, decision.rule, decision.explanation)
    with ExitStack() as undo:
        if parts is not None:
            undo.callback(parts.close, None)
            adopt_hooks(runner, parts.hooks)
        tap = install_tap(runner, layers=settings.captured_layers) if settings.tap else None
        session = StageSession(settings, decision, parts=parts, tap=tap, told_settings=resolved.plain())
        undo.pop_all()
    return session
