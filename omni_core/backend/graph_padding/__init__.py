# SPDX-License-Identifier: Apache-2.0
"""The token counts steps run at in vLLM and vllm-ascend, for simulators and tests; the cache trusts the tensor."""

from omni_core.backend.graph_padding.ascend import AscendConfig, AscendGraphPadding, SequenceParallel
from omni_core.backend.graph_padding.batch import BatchShape, PaddedBatch, UniformDecode
from omni_core.backend.graph_padding.capture_sizes import CaptureSizes, round_up
from omni_core.backend.graph_padding.graph_config import GraphConfig
from omni_core.backend.graph_padding.graph_mode import ANY_MODE, EAGER_ONLY, NO_FULL_GRAPH, CaptureMode, GraphMode
from omni_core.backend.graph_padding.lora_graphs import NO_LORA, LoraCapture, LoraGraphs
from omni_core.backend.graph_padding.microbatches import NO_MICROBATCHES, Microbatches
from omni_core.backend.graph_padding.runner_padding import RunnerGraphPadding
from omni_core.backend.graph_padding.vllm_v1 import V1Dispatcher
from omni_core.backend.graph_padding.vllm_v1_ranks import V1GraphPadding

__all__ = [
    "ANY_MODE",
    "EAGER_ONLY",
    "NO_FULL_GRAPH",
    "NO_LORA",
    "NO_MICROBATCHES",
    "AscendConfig",
    "AscendGraphPadding",
    "BatchShape",
    "CaptureMode",
    "CaptureSizes",
    "GraphConfig",
    "GraphMode",
    "LoraCapture",
    "LoraGraphs",
    "Microbatches",
    "PaddedBatch",
    "RunnerGraphPadding",
    "SequenceParallel",
    "UniformDecode",
    "V1Dispatcher",
    "V1GraphPadding",
    "round_up",
]
