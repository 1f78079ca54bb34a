# SPDX-License-Identifier: Apache-2.0
"""Workloads for fuzzing: what a seed draws has a little of everything; these have much of what is rare there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from omni_core.testing.scheduler_config import Mishaps, Preemption
from omni_core.testing.workload_config import WorkloadConfig

_MOST_PADDING = 8
"""Tokens a request may need beyond prompt and output: drafts, and a side group's window."""


def draw_fuzz_workload(seed: int) -> WorkloadConfig:
    """The workload of a seed; six seeds in a row give every sort."""
    return _SORTS[seed % len(_SORTS)](seed)


def draw_drafting(seed: int) -> WorkloadConfig:
    """Long outputs, many drafts, most of them rejected."""
    config = WorkloadConfig.draw(seed)
    scheduler = replace(config.stage.scheduler, max_draft_tokens=6, max_num_tokens=64, max_num_requests=8)
    config = replace(
        config,
        stage=replace(config.stage, scheduler=scheduler, drafts_accepted=0.3),
        max_prompt_tokens=24,
        max_output_tokens=24,
    )
    return _with_room_for(4, config)


def draw_preempting(seed: int) -> WorkloadConfig:
    """Equal prompts in chunks, preempted all the time: what one loses, another has computed when it is back."""
    config = WorkloadConfig.draw(seed)
    scheduler = replace(
        config.stage.scheduler,
        preemption=Preemption.RECOMPUTE_V1 if seed % 4 < 2 else Preemption.RECOMPUTE_V2,
        mishaps=Mishaps(seed, preempted=0.6),
        max_num_tokens=48,
        max_num_requests=8,
        max_chunk_tokens=12,
    )
    config = replace(
        config,
        stage=replace(config.stage, scheduler=scheduler),
        num_prefixes=2,
        max_prompt_tokens=80,
        max_output_tokens=2,
        equal_burst=0.9,
    )
    return _with_room_for(4, config)


def draw_replacing(seed: int) -> WorkloadConfig:
    """Contents are replaced all the time, and outputs are built late."""
    config = WorkloadConfig.draw(seed)
    return replace(config, likelihoods=replace(config.likelihoods, replaced=0.5), max_steps_late=4)


def _with_room_for(num_requests: int, config: WorkloadConfig) -> WorkloadConfig:
    scheduler = config.stage.scheduler
    largest = config.max_prompt_tokens + config.max_output_tokens + _MOST_PADDING + (scheduler.side_group_window or 0)
    num_blocks = 1 + num_requests * -(-largest // scheduler.block_size)
    return replace(config, stage=replace(config.stage, scheduler=replace(scheduler, num_blocks=num_blocks)))


_SORTS: tuple[Callable[[int], WorkloadConfig], ...] = (
    WorkloadConfig.draw,
    draw_preempting,
    WorkloadConfig.draw_cramped,
    draw_drafting,
    draw_preempting,
    draw_replacing,
)
