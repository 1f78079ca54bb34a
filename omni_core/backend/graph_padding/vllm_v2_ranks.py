# SPDX-License-Identifier: Apache-2.0
"""The padding of vLLM's V2 runner: its dispatcher, and what data-parallel ranks agree on.

Source: vLLM 0.32, `v1/worker/gpu/dp_utils.py` `dispatch_cg_and_sync_dp`, `sync_cudagraph_and_dp_padding`,
`v1/worker/gpu/model_runner.py` `execute_model`, `gather_batch_req_state`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from omni_core.backend.graph_padding.batch import BatchShape, PaddedBatch, Prefills, UniformDecode
from omni_core.backend.graph_padding.graph_config import GraphConfig
from omni_core.backend.graph_padding.graph_mode import ANY_MODE, EAGER_ONLY, GraphMode
from omni_core.backend.graph_padding.runner_padding import RunnerGraphPadding
from omni_core.backend.graph_padding.vllm_v2 import V2Config, V2Dispatcher


@dataclass(frozen=True, slots=True)
class _Agreed:
    """What the graph of a step is chosen by, once the ranks have agreed."""

    num_tokens: int
    uniform_query_len: int | None
    max_query_len: int | None


class V2GraphPadding(RunnerGraphPadding):
    """vLLM's V2 runner.

    If any rank finds no graph for its step, every rank runs its own token count eagerly. Else all run the graph for the
    largest step. If all split their steps into microbatches, all run the largest token count, in a graph or eagerly.

    A step counts as one of uniform decodes by its counts and `prefills`; `EXCLUDED` says it is none.

    Args:
        config: what the engine captured graphs for.
        v2: the settings of this runner.
    """

    def __init__(self, config: GraphConfig, v2: V2Config | None = None) -> None:
        self._dispatcher = V2Dispatcher(config, v2 or V2Config())

    def padded_step(self, batch: BatchShape) -> PaddedBatch:
        if batch.allowed not in (ANY_MODE, EAGER_ONLY):
            raise ValueError(f"allowed={sorted(batch.allowed)}: the V2 runner allows a step every mode or eager only")
        return self._dispatched(batch, _own(batch), allowed=batch.allowed)

    def padded_ranks(self, batches: Sequence[BatchShape]) -> tuple[PaddedBatch, ...]:
        if not batches:
            raise ValueError("padded_ranks: there is no rank")
        own = tuple(map(self.padded_step, batches))
        if len(own) == 1:
            return own
        agreed = _agreed([_own(batch) for batch in batches])
        if not agreed.num_tokens:
            return (PaddedBatch(mode=GraphMode.NONE, num_tokens=0),) * len(batches)
        if self._all_split(batches, agreed):
            return self._split(batches, agreed)
        if any(each.mode is GraphMode.NONE for each in own):
            return tuple(PaddedBatch(mode=GraphMode.NONE, num_tokens=batch.num_tokens) for batch in batches)
        return tuple(self._dispatched(batch, agreed) for batch in batches)

    def _dispatched(
        self, batch: BatchShape, by: _Agreed, *, num_ubatches: int = 1, allowed: frozenset[GraphMode] = ANY_MODE
    ) -> PaddedBatch:
        return self._dispatcher.dispatch(
            by.num_tokens,
            num_reqs=batch.num_reqs,
            uniform_query_len=by.uniform_query_len,
            max_query_len=by.max_query_len,
            num_active_loras=batch.num_active_loras,
            num_ubatches=num_ubatches,
            allowed=allowed,
        )

    def _all_split(self, batches: Sequence[BatchShape], agreed: _Agreed) -> bool:
        smallest = min(batch.num_tokens for batch in batches)
        uniform = agreed.uniform_query_len == self._dispatcher.config.query_len
        wanted = self._dispatcher.v2.microbatches.wanted(smallest, uniform_decode=uniform)
        return wanted and all(batch.may_split for batch in batches)

    def _split(self, batches: Sequence[BatchShape], agreed: _Agreed) -> tuple[PaddedBatch, ...]:
        num_ubatches = self._dispatcher.v2.microbatches.num_ubatches
        by = _Agreed(agreed.num_tokens, agreed.uniform_query_len, None)
        smallest = min(batch.num_tokens for batch in batches)
        eager = PaddedBatch(mode=GraphMode.NONE, num_tokens=agreed.num_tokens, num_ubatches=num_ubatches)
        graphs = tuple(self._dispatched(batch, by, num_ubatches=num_ubatches) for batch in batches)
        # The last part of a rank's step would be padding only: vLLM asks so for two parts, whatever their number.
        return tuple(eager if 2 * smallest < graph.num_tokens else graph for graph in graphs)


def _own(batch: BatchShape) -> _Agreed:
    uniform = batch.prefills is not Prefills.SOME and batch.uniform_decode is not UniformDecode.EXCLUDED
    return _Agreed(
        batch.num_tokens,
        batch.uniform_query_len if uniform else None,
        batch.max_query_len if batch.prefills is Prefills.NONE else None,
    )


def _agreed(ranks: Sequence[_Agreed]) -> _Agreed:
    uniform_query_lens = {rank.uniform_query_len for rank in ranks}
    longest = [rank.max_query_len for rank in ranks if rank.max_query_len]
    return _Agreed(
        max(rank.num_tokens for rank in ranks),
        uniform_query_lens.pop() if len(uniform_query_lens) == 1 else None,
        max(longest) if len(longest) == len(ranks) else None,
    )
