# SPDX-License-Identifier: Apache-2.0
"""The padding of vllm-ascend's runner: sequence parallel first, then vLLM's dispatcher, then what ranks agree on.

Source: vllm-ascend 0.18.0 and 0.23.0, `worker/model_runner_v1.py`, `_pad_for_sequence_parallelism`,
`_determine_batch_execution_and_padding`, `_sync_batch_across_dp` (0.23: `_sync_metadata_across_dp`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from omni_core.backend.graph_padding.batch import BatchShape, PaddedBatch, UniformDecode
from omni_core.backend.graph_padding.capture_sizes import round_up
from omni_core.backend.graph_padding.graph_config import GraphConfig
from omni_core.backend.graph_padding.graph_mode import GraphMode
from omni_core.backend.graph_padding.runner_padding import RunnerGraphPadding
from omni_core.backend.graph_padding.vllm_v1 import V1Dispatcher


class SequenceParallel(Enum):
    """How tensor-parallel ranks share the tokens of a step."""

    OFF = auto()
    FLASHCOMM1 = auto()
    """`enable_sp`: every step is a multiple of the tensor-parallel size, and data-parallel ranks pad alike."""
    COMPILE_PASS = auto()
    """`enable_sp_by_pass`: every step starts from a multiple; captured sizes may be others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AscendConfig:
    """The settings of vllm-ascend that padding depends on.

    Raises:
        ValueError: the tensor-parallel size is below 1.
    """

    tensor_parallel_size: int = 1
    sequence_parallel: SequenceParallel = SequenceParallel.OFF
    fine_grained_tp: bool = False
    """0.23: the output projection or the embedding has a tensor-parallel size of its own."""
    ranks_agree: bool = True
    """`False` where ranks exchange no counts: dense models, and some MoE decode nodes
    (`should_skip_allreduce_across_dp_group`)."""

    def __post_init__(self) -> None:
        if self.tensor_parallel_size < 1:
            raise ValueError(f"tensor_parallel_size={self.tensor_parallel_size}: must be at least 1")


class AscendGraphPadding(RunnerGraphPadding):
    """vllm-ascend's runner, 0.18 and 0.23.

    A rank whose own step found a graph pads to the largest count of all ranks even if they then run eagerly, so a step
    may be padded with mode `NONE`, and ranks may differ.

    Args:
        graphs: what the engine captured graphs for.
        ascend: the settings of vllm-ascend.

    Raises:
        ValueError: as `V1Dispatcher`; or FlashComm1 is on and a capture size is no multiple of the tensor-parallel
            size.
    """

    def __init__(self, graphs: GraphConfig, ascend: AscendConfig) -> None:
        self._dispatcher = V1Dispatcher(graphs)
        self._ascend = ascend
        tp_size = ascend.tensor_parallel_size
        odd = [size for size in graphs.capture_sizes.sizes if size % tp_size]
        if ascend.sequence_parallel is SequenceParallel.FLASHCOMM1 and odd:
            raise ValueError(
                f"capture sizes {odd} are no multiples of tensor_parallel_size={tp_size}: vllm-ascend drops them when "
                "FlashComm1 is on"
            )

    def padded_step(self, batch: BatchShape) -> PaddedBatch:
        num_tokens = batch.num_tokens
        if self._ascend.sequence_parallel is not SequenceParallel.OFF:
            num_tokens = round_up(num_tokens, self._ascend.tensor_parallel_size)
        return self._dispatched(batch, num_tokens, batch.allowed)

    def padded_ranks(self, batches: Sequence[BatchShape]) -> tuple[PaddedBatch, ...]:
        if not batches:
            raise ValueError("padded_ranks: there is no rank")
        own = tuple(map(self.padded_step, batches))
        if not self._ascend.ranks_agree:
            return own
        agreed = min(each.mode for each in own)
        largest = max(each.num_tokens for each in own)
        return tuple(
            self._dispatched(batch, largest if self._pads_to_largest(each) else each.num_tokens, frozenset({agreed}))
            for batch, each in zip(batches, own, strict=True)
        )

    def _pads_to_largest(self, own: PaddedBatch) -> bool:
        return (
            own.mode is not GraphMode.NONE
            or self._ascend.sequence_parallel is SequenceParallel.FLASHCOMM1
            or self._ascend.fine_grained_tp
        )

    def _dispatched(self, batch: BatchShape, num_tokens: int, allowed: frozenset[GraphMode]) -> PaddedBatch:
        query_len = self._dispatcher.config.query_len
        return self._dispatcher.dispatch(
            num_tokens,
            uniform_decode=batch.is_uniform_decode(query_len) and not _may_be_prefill(batch, query_len),
            num_active_loras=batch.num_active_loras,
            allowed=allowed,
        )


def _may_be_prefill(batch: BatchShape, query_len: int) -> bool:
    """Whether a first chunk as long as a decode with drafts keeps the step from being one of decodes."""
    return batch.uniform_decode is UniformDecode.BY_COUNTS and query_len > 1 and batch.num_first_chunks > 0
