# SPDX-License-Identifier: Apache-2.0
"""The padding code of one vllm-ascend, over that of a vLLM, run with stand-ins for the rest of an engine."""

import enum
import math
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from source_cuts import cut, cut_class
from vllm_text import QuietLogger, VllmText, round_up_as_vllm


class AscendText:
    """One vllm-ascend's padding code, over the vLLM it was made for."""

    def __init__(self, package: Path, vllm: VllmText) -> None:
        self.package = package
        self.vllm = vllm
        # vllm-ascend replaces this method of vLLM's dispatcher.
        vllm.dispatcher_class._create_padded_batch_descriptor = cut(
            package,
            "patch/worker/patch_cudagraph.py",
            "_create_padded_batch_descriptor",
            CUDAGraphMode=vllm.mode,
            BatchDescriptor=vllm.descriptor,
        )._create_padded_batch_descriptor

    def runner_class(self, sync: str, **flags: Callable[..., bool]) -> type:
        """A class with the methods of `NPUModelRunner` that choose a graph.

        Args:
            sync: the method in which ranks agree.
            flags: what vllm-ascend's settings say, such as `enable_sp`.
        """
        smallest_mode = cut(self.package, "worker/model_runner_v1.py", "_post_process_cudagraph_mode")
        return cut_class(
            self.package,
            "worker/model_runner_v1.py",
            "NPUModelRunner",
            "_pad_for_sequence_parallelism",
            sync,
            "_determine_batch_execution_and_padding",
            base=SimpleNamespace,
            **vars(smallest_mode),
            CUDAGraphMode=self.vllm.mode,
            BatchDescriptor=self.vllm.descriptor,
            np=np,
            torch=torch,
            dist=self.vllm.reduce,
            get_dp_group=lambda: self.vllm.reduce,
            round_up=round_up_as_vllm,
            **flags,
        )

    @cached_property
    def attention_states(self) -> type[enum.Enum]:
        """`AscendAttentionState`."""
        return cut(
            self.package, "attention/attention_v1.py", "AscendAttentionState", Enum=enum.Enum
        ).AscendAttentionState

    def runner_310p_class(self, runner_class: type) -> type:
        """`NPUModelRunner310` over `runner_class`."""
        return cut_class(
            self.package,
            "_310p/model_runner_310p.py",
            "NPUModelRunner310",
            "_determine_batch_execution_and_padding",
            base=runner_class,
            np=np,
            AscendAttentionState=self.attention_states,
            _NGRAM_GRAPH_UNIFORM_DECODE_QUERY_LEN=1,
        )

    def default_max_size(self) -> Callable[[SimpleNamespace], int | None]:
        """`_get_default_max_cudagraph_capture_size`."""
        method = cut(self.package, "platform.py", "NPUPlatform._get_default_max_cudagraph_capture_size")
        return lambda vllm_config: method._get_default_max_cudagraph_capture_size(None, vllm_config)

    def thinner(self, **stand_ins: object) -> Callable[[SimpleNamespace], None]:
        """0.18's `update_aclgraph_sizes`."""
        return cut(
            self.package,
            "utils.py",
            "update_cudagraph_capture_sizes",
            "update_aclgraph_sizes",
            logger=QuietLogger(),
            math=math,
            **stand_ins,
        ).update_aclgraph_sizes

    def pruner_for_950(self) -> Callable[[SimpleNamespace], None]:
        """0.23's `prune_capture_sizes_for_950`."""
        update = cut(self.package, "utils.py", "update_cudagraph_capture_sizes", logger=QuietLogger())
        return cut(
            self.package,
            "platform.py",
            "prune_capture_sizes_for_950",
            MAX_CAPTURE_SIZES_FOR_950=4,
            logger=QuietLogger(),
            **vars(update),
        ).prune_capture_sizes_for_950
