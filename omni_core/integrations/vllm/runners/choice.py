# SPDX-License-Identifier: Apache-2.0
"""Which view reads the model runner of a stage, and what the stage needs with it."""

from __future__ import annotations

from typing import Any

from omni_core.integrations.vllm.runners import v1, v2
from omni_core.integrations.vllm.runners.runner_view import RunnerView
from omni_core.settings.errors import SettingsError
from omni_core.settings.sources import SECTION
from omni_core.settings.stage_settings import StageSettings

SLOTS_BESIDE_STEPS_IN_FLIGHT = 2
"""One for a step that the builder is at, and the one that is kept for a step to be given up."""


def runner_view(vllm_config: Any, group_index: int, block_size: int, *, uses_v2_runner: bool) -> RunnerView:
    """The view of a stage's runner.

    Args:
        vllm_config: vLLM's `VllmConfig`.
        group_index: the KV-cache group that is mirrored.
        block_size: tokens per block of that group.
        uses_v2_runner: which runner the worker runs.
    """
    if uses_v2_runner:
        return v2.V2View(
            group_index,
            max_num_reqs=int(vllm_config.scheduler_config.max_num_seqs),
            max_model_len=int(vllm_config.model_config.max_model_len),
            block_size=block_size,
        )
    return v1.V1View(group_index, tokens_come_later=_tokens_come_later(vllm_config, uses_v2_runner=False))


def block_table_block_size(runner: Any, group_index: int, *, uses_v2_runner: bool) -> int:
    """Tokens per entry of the runner's block table of one KV-cache group."""
    if uses_v2_runner:
        return v2.block_table_block_size(runner, group_index)
    return v1.block_table_block_size(runner, group_index)


def check_staging(settings: StageSettings, vllm_config: Any, *, uses_v2_runner: bool) -> None:
    """Refuse so few staging slots that no step could be handed on. Before anything is loaded.

    Raises:
        SettingsError: names the setting, why it is too small, and the least.
    """
    if not _tokens_come_later(vllm_config, uses_v2_runner=uses_v2_runner):
        return
    # As `VllmConfig.max_concurrent_batches` counts them.
    in_flight = vllm_config.parallel_config.pipeline_parallel_size + bool(vllm_config.scheduler_config.async_scheduling)
    least = in_flight + SLOTS_BESIDE_STEPS_IN_FLIGHT
    if settings.staging_depth < least:
        cause = "model runner V2" if uses_v2_runner else "async_scheduling"
        raise SettingsError(
            f"{SECTION}.staging_depth={settings.staging_depth}: with {cause} a step keeps its slot until its sampled "
            f"tokens are known, and {in_flight} steps may be in flight here; set at least {least}"
        )


def _tokens_come_later(vllm_config: Any, *, uses_v2_runner: bool) -> bool:
    return uses_v2_runner or bool(vllm_config.scheduler_config.async_scheduling)
