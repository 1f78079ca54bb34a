# SPDX-License-Identifier: Apache-2.0
"""The token counts steps run at in vLLM and vllm-ascend, for simulators and tests; the cache trusts the tensor.

`RunnerGraphPadding` is a rule; its classes are the runners. `captured_sizes` and what follows it give the sizes an
engine captures from its settings.
"""

from omni_core.backend.graph_padding.ascend import AscendConfig, AscendGraphPadding, SequenceParallel
from omni_core.backend.graph_padding.ascend_310p import Ascend310pGraphPadding, SpecDecodeGraphs
from omni_core.backend.graph_padding.ascend_rules import (
    ASCEND_0_18,
    ASCEND_0_23,
    ASCEND_950_SIZES,
    AclStreams,
    HcclExpansion,
    ascend_capture_mode_0_18,
    kept_for_sequence_parallel,
    thinned,
)
from omni_core.backend.graph_padding.batch import AttentionState, BatchShape, PaddedBatch, Prefills, UniformDecode
from omni_core.backend.graph_padding.capture_rules import (
    VLLM_0_18,
    VLLM_0_23,
    VLLM_0_32,
    VLLM_0_32_BLACKWELL,
    CaptureRules,
    CaptureSettings,
    PerformanceMode,
    captured_sizes,
    rounded_for_decodes,
)
from omni_core.backend.graph_padding.capture_sizes import CaptureSizes, round_up
from omni_core.backend.graph_padding.draft_schedule import DraftRange, decode_tiers
from omni_core.backend.graph_padding.graph_config import GraphConfig
from omni_core.backend.graph_padding.graph_mode import ANY_MODE, EAGER_ONLY, NO_FULL_GRAPH, CaptureMode, GraphMode
from omni_core.backend.graph_padding.lora_graphs import NO_LORA, LoraCapture, LoraGraphs
from omni_core.backend.graph_padding.microbatches import NO_MICROBATCHES, Microbatches
from omni_core.backend.graph_padding.runner_padding import RunnerGraphPadding
from omni_core.backend.graph_padding.vllm_v1 import V1Dispatcher
from omni_core.backend.graph_padding.vllm_v1_ranks import V1GraphPadding
from omni_core.backend.graph_padding.vllm_v2 import DecodeGraphs, MixedGraphs, V2Config, V2Dispatcher
from omni_core.backend.graph_padding.vllm_v2_ranks import V2GraphPadding

__all__ = [
    "ANY_MODE",
    "ASCEND_0_18",
    "ASCEND_0_23",
    "ASCEND_950_SIZES",
    "EAGER_ONLY",
    "NO_FULL_GRAPH",
    "NO_LORA",
    "NO_MICROBATCHES",
    "VLLM_0_18",
    "VLLM_0_23",
    "VLLM_0_32",
    "VLLM_0_32_BLACKWELL",
    "AclStreams",
    "Ascend310pGraphPadding",
    "AscendConfig",
    "AscendGraphPadding",
    "AttentionState",
    "BatchShape",
    "CaptureMode",
    "CaptureRules",
    "CaptureSettings",
    "CaptureSizes",
    "DecodeGraphs",
    "DraftRange",
    "GraphConfig",
    "GraphMode",
    "HcclExpansion",
    "LoraCapture",
    "LoraGraphs",
    "Microbatches",
    "MixedGraphs",
    "PaddedBatch",
    "PerformanceMode",
    "Prefills",
    "RunnerGraphPadding",
    "SequenceParallel",
    "SpecDecodeGraphs",
    "UniformDecode",
    "V1Dispatcher",
    "V1GraphPadding",
    "V2Config",
    "V2Dispatcher",
    "V2GraphPadding",
    "ascend_capture_mode_0_18",
    "captured_sizes",
    "decode_tiers",
    "kept_for_sequence_parallel",
    "round_up",
    "rounded_for_decodes",
    "thinned",
]
