# SPDX-License-Identifier: Apache-2.0
"""When a step is split into microbatches, so that one computes while another communicates.

Source: vLLM 0.32, `v1/worker/ubatch_utils.py` `check_ubatch_thresholds`, `is_last_ubatch_empty`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatches:
    """The settings by which steps are split.

    Raises:
        ValueError: `num_ubatches` is below 1.
    """

    num_ubatches: int
    """Parts of a step that is split; 1: no step is."""
    decode_threshold_tokens: int = 0
    """`dbo_decode_token_threshold`: a step of uniform decodes with fewer tokens stays whole."""
    prefill_threshold_tokens: int = 0
    """`dbo_prefill_token_threshold`: any other step with fewer tokens stays whole."""

    def __post_init__(self) -> None:
        if self.num_ubatches < 1:
            raise ValueError(f"num_ubatches={self.num_ubatches}: a step has at least 1 part")

    def wanted(self, num_tokens: int, *, uniform_decode: bool) -> bool:
        """Whether a step of `num_tokens` real tokens is worth splitting."""
        threshold = self.decode_threshold_tokens if uniform_decode else self.prefill_threshold_tokens
        return self.num_ubatches > 1 and num_tokens >= threshold

    def last_is_empty(self, num_tokens: int, num_tokens_padded: int) -> bool:
        """Whether the last part of a split step would hold padding only."""
        return num_tokens_padded // self.num_ubatches * (self.num_ubatches - 1) >= num_tokens


NO_MICROBATCHES = Microbatches(num_ubatches=1)
"""Every step stays whole."""
