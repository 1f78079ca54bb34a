# SPDX-License-Identifier: Apache-2.0
"""The token counts vllm-ascend captures graphs at: fewer than vLLM, because a graph takes streams of the device.

Source: vllm-ascend 0.18.0 and 0.23.0, `platform.py` `_get_default_max_cudagraph_capture_size`,
`check_and_update_config`, 0.23 `prune_capture_sizes_for_950`; 0.18 `utils.py` `update_aclgraph_sizes`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from omni_core.backend.graph_padding.capture_rules import CaptureRules
from omni_core.backend.graph_padding.capture_sizes import CaptureSizes
from omni_core.backend.graph_padding.graph_mode import CaptureMode

ASCEND_0_18 = CaptureRules(default_steps=1, captures_largest_step=False, captures_decode_steps=False)
ASCEND_0_23 = CaptureRules(default_steps=1, captures_largest_step=True, captures_decode_steps=False)

ASCEND_950_SIZES = 4
"""Sizes 0.23 keeps on an Ascend 950 with piecewise graphs."""


class HcclExpansion(Enum):
    """`HCCL_OP_EXPANSION_MODE`: who unfolds a collective."""

    AIV = auto()
    OTHER = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class AclStreams:
    """What decides how many piecewise graphs fit the device's streams, in vllm-ascend 0.18."""

    num_hidden_layers: int
    draft_hidden_layers: int | None = None
    """Of the draft model; `None`: there is none."""
    data_parallel_size: int = 1
    tensor_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    expert_parallel: bool = False
    moe: bool = False
    overlaps_shared_expert: bool = False
    """`multistream_overlap_shared_expert`."""
    expansion: HcclExpansion = HcclExpansion.OTHER

    @property
    def max_sizes(self) -> int:
        """The most sizes whose graphs fit; may be below 1."""
        streams = 1800
        per_graph = self.num_hidden_layers + 1
        if self.draft_hidden_layers is not None:
            per_graph += self.draft_hidden_layers + 1
        groups = (self.data_parallel_size > 1) + (self.tensor_parallel_size > 1)
        if self.expansion is HcclExpansion.OTHER:
            streams -= 100 * ((self.prefill_context_parallel_size > 1) + (self.decode_context_parallel_size > 1))
            return (streams - 40 * groups) // (per_graph * (1 + 2 * groups))
        parts = 1 + groups + self.expert_parallel + self.overlaps_shared_expert
        if self.moe:
            parts += self.data_parallel_size > 1
        else:
            streams -= parts * per_graph
        return streams // (per_graph * parts)


def ascend_capture_mode_0_18(mode: CaptureMode, *, encoder_decoder: bool) -> CaptureMode:
    """The mode vllm-ascend 0.18 makes of the one asked for."""
    if encoder_decoder or mode is CaptureMode.FULL_AND_PIECEWISE:
        return CaptureMode.PIECEWISE
    return mode


def kept_for_sequence_parallel(sizes: CaptureSizes, tensor_parallel_size: int) -> CaptureSizes:
    """The sizes FlashComm1 keeps: multiples of the tensor-parallel size.

    Raises:
        ValueError: there is none.
    """
    kept = tuple(size for size in sizes.sizes if size % tensor_parallel_size == 0)
    if not kept:
        raise ValueError(
            f"capture sizes {sizes.sizes}: none is a multiple of tensor_parallel_size={tensor_parallel_size}"
        )
    return CaptureSizes(kept)


def thinned(sizes: CaptureSizes, max_sizes: int) -> CaptureSizes:
    """At most `max_sizes` of the sizes, evenly chosen, the first and the last always.

    Raises:
        ValueError: sizes must go and fewer than 2 may stay.
    """
    count = len(sizes.sizes)
    if count <= max_sizes:
        return sizes
    if max_sizes < 2:
        raise ValueError(f"{count} capture sizes, max_sizes={max_sizes}: the first and the last are always kept")
    step = (count - 1) / (max_sizes - 1)
    inner = (round(index * step) for index in range(1, max_sizes - 1))
    return CaptureSizes(tuple(sizes.sizes[index] for index in (0, *inner, count - 1)))
