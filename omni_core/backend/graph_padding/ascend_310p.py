# SPDX-License-Identifier: Apache-2.0
"""The padding of vllm-ascend's runner for the 310P: what it decides before the parent runner's rule.

Source: vllm-ascend 0.18.0 and 0.23.0, `_310p/model_runner_310p.py`, `_determine_batch_execution_and_padding`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum, auto

from omni_core.backend.graph_padding.ascend import AscendConfig, AscendGraphPadding
from omni_core.backend.graph_padding.batch import AttentionState, BatchShape, PaddedBatch, UniformDecode
from omni_core.backend.graph_padding.graph_config import GraphConfig
from omni_core.backend.graph_padding.graph_mode import EAGER_ONLY
from omni_core.backend.graph_padding.runner_padding import RunnerGraphPadding

_EAGER_STATES = frozenset({AttentionState.CHUNKED_PREFILL, AttentionState.PREFILL_CACHE_HIT})


class SpecDecodeGraphs(Enum):
    """Which steps of an engine with drafts a graph may serve."""

    ANY_STEP = auto()
    """0.18."""
    UNIFORM_DRAFTS = auto()
    """0.23: only those in which every request has all its drafts."""


class Ascend310pGraphPadding(RunnerGraphPadding):
    """vllm-ascend's runner for the 310P. A step's `attention_state` must be given.

    Args:
        graphs: what the engine captured graphs for; with n-gram drafts its `query_len` is 1.
        ascend: the settings of vllm-ascend.
        query_len: tokens of one request in a step with all its drafts: 1 + `num_speculative_tokens`.
        spec_decode_graphs: the release's rule.

    Raises:
        ValueError: as `AscendGraphPadding`.
    """

    def __init__(
        self, graphs: GraphConfig, ascend: AscendConfig, *, query_len: int, spec_decode_graphs: SpecDecodeGraphs
    ) -> None:
        self._padding = AscendGraphPadding(graphs, ascend)
        self._query_len = query_len
        self._spec_decode_graphs = spec_decode_graphs

    def padded_step(self, batch: BatchShape) -> PaddedBatch:
        return self._padding.padded_step(self._decided(batch))

    def padded_ranks(self, batches: Sequence[BatchShape]) -> tuple[PaddedBatch, ...]:
        return self._padding.padded_ranks([self._decided(batch) for batch in batches])

    def _decided(self, batch: BatchShape) -> BatchShape:
        state = batch.attention_state
        if state is None:
            raise ValueError("attention_state=None: the 310P runner chooses graphs by it")
        decode = not batch.num_first_chunks
        has_drafts = self._query_len > 1
        all_drafts = batch.uniform_query_len == self._query_len
        eager = state in _EAGER_STATES or (
            self._spec_decode_graphs is SpecDecodeGraphs.UNIFORM_DRAFTS
            and has_drafts
            and not (state is AttentionState.SPEC_DECODING and all_drafts)
        )
        uniform = batch.is_uniform_decode(self._query_len)
        if batch.uniform_decode is UniformDecode.BY_COUNTS:
            single_tokens = state is AttentionState.DECODE_ONLY and batch.uniform_query_len == 1 and decode
            uniform = single_tokens or (uniform and (decode or not has_drafts))
        return replace(
            batch,
            uniform_decode=UniformDecode.FORCED if uniform else UniformDecode.EXCLUDED,
            allowed=EAGER_ONLY if eager else batch.allowed,
        )
