# SPDX-License-Identifier: Apache-2.0
"""What vLLM's scheduler can be set to and `SchedulerConfig` has no word for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from omni_core.testing.scheduler_config import Preemption, SchedulerConfig


class KvGroups(Enum):
    """Which KV-cache groups a model has, in vLLM's order; always just one of them is full attention."""

    FULL = "full attention"
    FULL_THEN_SLIDING = "full attention, sliding window"
    SLIDING_THEN_FULL = "sliding window, sliding window, full attention"
    MAMBA_THEN_FULL = "mamba in align mode, full attention"
    """The only groups under which a hit of vLLM 0.32 can end inside a block."""


@dataclass(frozen=True, slots=True)
class VllmShape:
    """Settings of the real scheduler, beside a `SchedulerConfig`."""

    max_model_len: int
    """Longest prompt with output; vLLM sizes its block tables by it."""
    kv_groups: KvGroups = KvGroups.FULL
    match_unit: int | None = None
    """Tokens per block hash (vLLM: `prefix_match_unit`); given with `MAMBA_THEN_FULL` only, and divides the block."""
    async_scheduling: bool = False
    """Whether a step is scheduled before the tokens of the step before it are known."""
    reserve_full_prompt: bool = False
    """Whether a prompt is admitted only if all of it fits (vLLM: `scheduler_reserve_full_isl`)."""
    lookahead_tokens: int = 0
    """Slots allocated beyond a step's tokens, as drafters with a KV cache of their own need them."""

    def check(self, config: SchedulerConfig) -> None:
        """Check what belongs together.

        Raises:
            ValueError: names both settings.
        """
        hybrid = self.kv_groups in (KvGroups.FULL_THEN_SLIDING, KvGroups.SLIDING_THEN_FULL)
        if hybrid is not (config.side_group_window is not None):
            raise ValueError(f"kv_groups={self.kv_groups} with side_group_window={config.side_group_window}")
        mamba = self.kv_groups is KvGroups.MAMBA_THEN_FULL
        if config.partial_block_hits is not mamba:
            raise ValueError(
                f"partial_block_hits={config.partial_block_hits} with kv_groups={self.kv_groups}: in vLLM hits end "
                f"inside a block with {KvGroups.MAMBA_THEN_FULL} only"
            )
        if mamba and config.max_draft_tokens:
            raise ValueError(f"max_draft_tokens={config.max_draft_tokens} with kv_groups={self.kv_groups}")
        if config.max_chunk_tokens is not None and config.max_chunk_tokens <= config.max_draft_tokens:
            raise ValueError(
                f"max_chunk_tokens={config.max_chunk_tokens} with max_draft_tokens={config.max_draft_tokens}: vLLM "
                "0.32 cuts the placeholders of a request that has one token to compute, and then fails an assertion"
            )
        if self.async_scheduling and config.max_draft_tokens and config.mishaps.preempted:
            raise ValueError(
                f"mishaps.preempted={config.mishaps.preempted} with max_draft_tokens={config.max_draft_tokens} and "
                "async_scheduling=True: a reset throws away what a step in flight sampled, accepted drafts included, "
                "and the worker, which has delivered their rows, is not told"
            )
        if (self.match_unit is not None) is not mamba:
            raise ValueError(f"match_unit={self.match_unit} with kv_groups={self.kv_groups}")

    def blocks_for(self, config: SchedulerConfig, num_tokens: int) -> int:
        """Most blocks a request of so many tokens can hold at a time, over all groups."""
        slots = num_tokens + config.max_draft_tokens + self.lookahead_tokens
        per_group = -(-slots // config.block_size)
        groups = {KvGroups.FULL: 1, KvGroups.SLIDING_THEN_FULL: 3}.get(self.kv_groups, 2)
        # One for the copy of a block that is hit in part, in each group.
        return groups * (per_group + (self.match_unit is not None))


def v2_runner_form(config: SchedulerConfig) -> bool:
    """Whether outputs have the form for vLLM's second model runner: resumed requests are announced as new."""
    return config.preemption is Preemption.RECOMPUTE_V2
