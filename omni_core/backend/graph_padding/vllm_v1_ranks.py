# SPDX-License-Identifier: Apache-2.0
"""The padding of vLLM's V1 runner: its dispatcher, and what data-parallel ranks agree on.

Source: vLLM 0.32, `v1/worker/gpu_model_runner.py` `_determine_batch_execution_and_padding`, `v1/worker/dp_utils.py`
`coordinate_batch_across_dp`, `v1/worker/ubatch_utils.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from omni_core.backend.graph_padding.batch import BatchShape, PaddedBatch
from omni_core.backend.graph_padding.graph_config import GraphConfig
from omni_core.backend.graph_padding.graph_mode import GraphMode
from omni_core.backend.graph_padding.microbatches import NO_MICROBATCHES, Microbatches
from omni_core.backend.graph_padding.runner_padding import RunnerGraphPadding
from omni_core.backend.graph_padding.vllm_v1 import V1Dispatcher


class V1GraphPadding(RunnerGraphPadding):
    """vLLM's V1 runner.

    Ranks take the smallest mode of any of them. Unless that is `NONE`, or if all split their steps into microbatches,
    every rank runs at the largest padded count; else each keeps its own, which may be padded though eager.

    Args:
        config: what the engine captured graphs for.
        microbatches: the settings by which steps are split; it takes two ranks.

    Raises:
        ValueError: as `V1Dispatcher`.
    """

    def __init__(self, config: GraphConfig, microbatches: Microbatches = NO_MICROBATCHES) -> None:
        self._dispatcher = V1Dispatcher(config)
        self._microbatches = microbatches

    def padded_step(self, batch: BatchShape) -> PaddedBatch:
        return self._dispatched(batch, batch.num_tokens, batch.allowed)

    def padded_ranks(self, batches: Sequence[BatchShape]) -> tuple[PaddedBatch, ...]:
        if not batches:
            raise ValueError("padded_ranks: there is no rank")
        own = tuple(map(self.padded_step, batches))
        if len(own) == 1:
            return own
        agreed = min(each.mode for each in own)
        largest = max(each.num_tokens for each in own)
        split = self._all_split(batches, largest)
        num_ubatches = self._microbatches.num_ubatches if split else 1
        same_count = agreed is not GraphMode.NONE or split
        return tuple(
            replace(
                self._dispatched(batch, largest if same_count else each.num_tokens, frozenset({agreed})),
                num_ubatches=num_ubatches,
            )
            for batch, each in zip(batches, own, strict=True)
        )

    def _dispatched(self, batch: BatchShape, num_tokens: int, allowed: frozenset[GraphMode]) -> PaddedBatch:
        return self._dispatcher.dispatch(
            num_tokens,
            uniform_decode=batch.is_uniform_decode(self._dispatcher.config.query_len),
            num_active_loras=batch.num_active_loras,
            allowed=allowed,
        )

    def _all_split(self, batches: Sequence[BatchShape], largest: int) -> bool:
        query_len = self._dispatcher.config.query_len
        wanted = all(
            batch.may_split
            and self._microbatches.wanted(batch.num_tokens, uniform_decode=batch.is_uniform_decode(query_len))
            for batch in batches
        )
        smallest = min(batch.num_tokens for batch in batches)
        return wanted and not self._microbatches.last_is_empty(smallest, largest)
