# SPDX-License-Identifier: Apache-2.0
"""Limits of a simulated scheduler, and how often it does what real ones do under pressure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Preemption(Enum):
    """What happens when a running request needs a block and none is free."""

    NEVER = "never"
    """It cannot happen: admission reserves every block a request may come to need."""
    RECOMPUTE_V1 = "resumed"
    """The last running request loses its blocks; when it comes back it is announced as RESUMED (vLLM's V1 runner)."""
    RECOMPUTE_V2 = "started while live"
    """The same, announced as STARTED although its id is live (vLLM's V2 runner)."""


@dataclass(frozen=True, slots=True)
class Mishaps:
    """Chances, between 0 and 1, that a schedule has something rare in it."""

    seed: int = 0
    preempted: float = 0.0
    """A running request is preempted without need, as a reset of vLLM's prefix cache does. It may come back at once."""
    taken_back: float = 0.0
    """A request is scheduled, its blocks are hashed, and it is preempted before the schedule is out, as vLLM's priority
    policy does: the cache never hears of it, and the hashes can be found. Needs `block_digests`."""
    piece_delay: int = 3
    """Most schedules a request waits for its next piece of prompt."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of the simulated scheduler."""

    num_blocks: int
    """KV blocks, the null block included."""
    block_size: int
    max_num_tokens: int
    """Token budget of a step (vLLM: `max_num_batched_tokens`)."""
    max_num_requests: int = 16
    """Requests that run at one time (vLLM: `max_num_seqs`)."""
    max_chunk_tokens: int | None = None
    """Most prompt tokens of one request in one step (vLLM: `long_prefill_token_threshold`)."""
    partial_block_hits: bool = False
    """Whether a hit may end inside a block: that block is copied, as vLLM does where its match unit is smaller."""
    preemption: Preemption = Preemption.NEVER
    block_digests: bool = False
    """Whether events tell the token-prefix digest of each block."""
    max_draft_tokens: int = 0
    """Most draft tokens of one request in one step."""
    side_group_window: int | None = None
    """Given: a second KV group, with a sliding window of so many tokens, takes blocks from the same pool. The cache is
    never told of them: it mirrors the full-attention group."""
    mishaps: Mishaps = field(default_factory=Mishaps)

    def __post_init__(self) -> None:
        """Check what belongs together.

        Raises:
            ValueError: names the settings.
        """
        if self.mishaps.taken_back and not self.block_digests:
            raise ValueError(f"mishaps.taken_back={self.mishaps.taken_back} needs block_digests=True")
        if self.mishaps.taken_back and self.partial_block_hits:
            raise ValueError(
                f"mishaps.taken_back={self.mishaps.taken_back} with partial_block_hits=True: a block copy has no "
                "digest, so nobody could tell that its source was never computed"
            )
        unforced = self.preemption is Preemption.NEVER
        if unforced and (self.mishaps.preempted or self.mishaps.taken_back):
            raise ValueError(f"{self.mishaps} needs a preemption that is not {self.preemption}")
