# SPDX-License-Identifier: Apache-2.0
"""The block that vLLM's hits are made of, and the one warning of a stage whose prompts are too short to ever hit.

vLLM 0.32 (`resolve_kv_cache_block_sizes` in `v1/core/kv_cache_utils.py`, `get_computed_blocks` in
`v1/core/kv_cache_manager.py`): with several KV-cache groups a hit ends where a block of each of them ends, which is
every least common multiple of their block sizes; and it leaves at least the prompt's last token to be computed.

With speculation from the target's hidden states (`eagle`, `eagle3`, `mtp`, `dflash`, `dspark`;
`SpeculativeConfig.use_eagle_block_drop`) the last block of what was found is dropped again
(`FullAttentionManager.find_longest_cache_hit`), so a block more has to be there. With one KV-cache group it must lie
before the prompt's last token; with several (`HybridKVCacheCoordinator`, 0.32) it may end with the prompt.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from omni_core.integrations.vllm.delivery.built_step import StartedRequest
from omni_core.integrations.vllm.versions import draft_groups, drops_block_of_hits, hit_alignment_tokens
from omni_core.settings.sources import SECTION

_LOG = logging.getLogger(__name__)

MAMBA_KIND = "mamba"
"""vLLM's word for a KV-cache group that keeps a state instead of every token's keys and values."""


@dataclass(frozen=True, slots=True)
class BlockOfGroup:
    """One KV-cache group."""

    kind: str
    """In vLLM's own words, such as `mamba`."""
    num_tokens: int
    """Tokens per block."""


@dataclass(frozen=True, slots=True)
class EffectiveBlock:
    """What every hit of a stage is a whole number of."""

    num_tokens: int
    groups: tuple[BlockOfGroup, ...]
    dropped_tokens: int = 0
    """What vLLM drops at the end of what it found, for speculation from the target's hidden states."""

    @property
    def fewest_prompt_tokens(self) -> int:
        """The shortest prompt that can hit. Its last token is always computed."""
        if len(self.groups) > 1:
            return self.num_tokens + max(1, self.dropped_tokens)
        return self.num_tokens + self.dropped_tokens + 1

    def can_hit(self, num_prompt_tokens: int) -> bool:
        """Whether a prompt of so many tokens can hit at all."""
        return num_prompt_tokens >= self.fewest_prompt_tokens

    @property
    def causes(self) -> str:
        """The groups that make the block as long as it is, in words: those whose blocks no other's is made of."""
        sizes = {group.num_tokens for group in self.groups}
        longest = {size for size in sizes if not any(other > size and other % size == 0 for other in sizes)}
        counts = Counter(group for group in self.groups if group.num_tokens in longest)
        return ", ".join(
            f"{f'{count} x ' if count > 1 else ''}{group.kind} ({group.num_tokens} tokens per block)"
            for group, count in counts.items()
        )

    @property
    def explanation(self) -> str:
        """Why a prompt must be longer than that, and which groups say so."""
        inside = any(self.num_tokens % group.num_tokens for group in self.groups)
        origin = "hits may end inside the blocks of" if inside else "the block comes from"
        dropped = (
            f"; with this speculative method vLLM computes the last {self.dropped_tokens} tokens of what it found again"
            if self.dropped_tokens
            else ""
        )
        return (
            f"vLLM's hits are whole effective blocks, here {self.num_tokens} tokens, and leave the last token of a "
            f"prompt to be computed{dropped}; {origin} the KV-cache group {self.causes}"
        )

    @property
    def remedy(self) -> str:
        """What makes it shorter. vLLM sizes the blocks of a stage with a Mamba group itself, by the group's state."""
        if any(group.kind == MAMBA_KIND for group in self.groups):
            return "set prefix_match_unit to a number that divides it, so that hits may end inside a Mamba block"
        return "pass a smaller block_size"


def effective_block(kinds: Sequence[str], kv_cache_config: Any, vllm_config: Any) -> EffectiveBlock:
    """What every hit of a stage is a whole number of.

    Args:
        kinds: kind of each KV-cache group.
        kv_cache_config: vLLM's `KVCacheConfig`.
        vllm_config: vLLM's `VllmConfig`.
    """
    groups = tuple(
        BlockOfGroup(kind, int(group.kv_cache_spec.block_size))
        for kind, group in zip(kinds, kv_cache_config.kv_cache_groups, strict=True)
    )
    alignment_tokens = hit_alignment_tokens(kv_cache_config, vllm_config)
    dropped_tokens = 0
    if drops_block_of_hits(vllm_config):
        # Of every group, if vLLM could not tell which holds the draft's layers. What a Mamba group found stays whole.
        drafts = draft_groups(kv_cache_config)
        dropping = (
            min(alignment_tokens, group.num_tokens)
            for group, of_draft in zip(groups, drafts, strict=True)
            if group.kind != MAMBA_KIND and (of_draft or not any(drafts))
        )
        dropped_tokens = max(dropping, default=0)
    return EffectiveBlock(alignment_tokens, groups, dropped_tokens)


def warn_if_no_prompt_can_hit(block: EffectiveBlock, max_model_len: int) -> bool:
    """Warn of a stage whose longest possible prompt cannot hit. At start.

    Returns:
        Whether it was warned of.
    """
    if block.can_hit(max_model_len):
        return False
    _LOG.warning(
        "Omni Core is on, but no request can ever hit: max_model_len=%d is below the %d tokens of the shortest prompt "
        "that can. %s. Raise max_model_len to %d or more, %s, or turn the cache off on this stage (%s.enabled=false)",
        max_model_len,
        block.fewest_prompt_tokens,
        block.explanation,
        block.fewest_prompt_tokens,
        block.remedy,
        SECTION,
    )
    return True


def warn_if_first_prompts_cannot_hit(block: EffectiveBlock, started: Sequence[StartedRequest]) -> None:
    """Warn if a stage's first prompts are all too short to ever hit. Once per stage, for its first step with any.

    Engine thread; a stage whose first step has a prompt that is long enough is never warned of.
    """
    lengths = {one.req_id: len(one.prompt_token_ids) for one in started if one.prompt_token_ids is not None}
    if not lengths or any(map(block.can_hit, lengths.values())):
        return
    req_id, num_prompt_tokens = max(lengths.items(), key=lambda item: item[1])
    _LOG.warning(
        "Omni Core is on, but the first prompts of this stage are too short to ever hit: the longest, of request %r, "
        "has %d tokens. %s. Prompts of %d tokens or more can hit. If yours stay shorter, %s, or turn the cache off on "
        "this stage (%s.enabled=false). This is said once",
        req_id,
        num_prompt_tokens,
        block.explanation,
        block.fewest_prompt_tokens,
        block.remedy,
        SECTION,
    )
