# SPDX-License-Identifier: Apache-2.0
"""What every runner's padding rule answers: for a token count, for a step, and for the steps of all ranks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from omni_core.backend.base import GraphPadding
from omni_core.backend.graph_padding.batch import AttentionState, BatchShape, PaddedBatch, Prefills, UniformDecode


class RunnerGraphPadding(GraphPadding):
    """The padding rule of one runner. Immutable; any thread."""

    def padded(self, num_tokens: int) -> int:
        """The row count of a step of one new request with `num_tokens` tokens and no adapter.

        Raises:
            ValueError: `num_tokens` is below 1.
        """
        if num_tokens < 1:
            raise ValueError(f"num_tokens={num_tokens}: a step has at least 1 token")
        batch = BatchShape(
            num_tokens=num_tokens,
            num_reqs=1,
            max_query_len=num_tokens,
            num_first_chunks=1,
            prefills=Prefills.SOME,
            attention_state=AttentionState.PREFILL_NO_CACHE,
            uniform_decode=UniformDecode.EXCLUDED,
        )
        return self.padded_step(batch).num_tokens

    @abstractmethod
    def padded_step(self, batch: BatchShape) -> PaddedBatch:
        """What a step runs as on a rank that agrees with no other: data-parallel size 1.

        Raises:
            ValueError: the runner needs to know more of the step, or knows no such restriction; names it.
        """

    @abstractmethod
    def padded_ranks(self, batches: Sequence[BatchShape]) -> tuple[PaddedBatch, ...]:
        """What the steps of all data-parallel ranks run as, in rank order, once the ranks have agreed.

        Raises:
            ValueError: there is no rank; or as `padded_step`.
        """
