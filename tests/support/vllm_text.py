# SPDX-License-Identifier: Apache-2.0
"""The padding code of one vLLM, cut out of its sources and run with stand-ins for the rest of an engine."""

import bisect
import enum
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import groupby, product
from pathlib import Path
from types import SimpleNamespace

import torch
from source_cuts import cut, cut_class

from omni_core.backend.graph_padding import GraphConfig

VLLM_MODULES = (
    "config/compilation.py",
    "config/vllm.py",
    "forward_context.py",
    "lora/utils.py",
    "v1/cudagraph_dispatcher.py",
    "v1/spec_decode/dynamic/utils.py",
    "v1/worker/dp_utils.py",
    "v1/worker/gpu/cudagraph_utils.py",
    "v1/worker/gpu/dp_utils.py",
    "v1/worker/gpu_model_runner.py",
    "v1/worker/ubatch_utils.py",
    "v1/worker/utils.py",
)
"""What `VllmText` reads."""


class QuietLogger:
    """Takes what vLLM would log."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


class _WordSaidError(Exception):
    """Ends a rank's first call once it has said its part."""


class AllReduce:
    """A sum over ranks that run one after the other: each says its part in a first call, and gets the sum in a second.

    Stands for `torch.distributed` and for the data-parallel group at once.
    """

    device = cpu_group = device_group = "cpu"

    def __init__(self) -> None:
        self._parts: list[torch.Tensor] = []
        self._total: torch.Tensor | None = None

    def all_reduce(self, tensor: torch.Tensor, group: object = None) -> None:
        if self._total is None:
            self._parts.append(tensor.clone())
            raise _WordSaidError
        tensor.copy_(self._total)

    def cpu_all_reduce_(self, tensor: torch.Tensor) -> None:
        self.all_reduce(tensor)

    def results(self, ranks: list[Callable[[], object]]) -> list[object]:
        """What each rank's call returns. A call that reduces nothing runs twice."""
        self._parts, self._total = [], None
        for rank in ranks:
            try:
                rank()
            except _WordSaidError:
                continue
        self._total = sum(self._parts) if self._parts else torch.zeros(())
        return [rank() for rank in ranks]


class VllmText:
    """One vLLM's padding code."""

    def __init__(self, package: Path) -> None:
        self.package = package
        self.reduce = AllReduce()
        self.mode = cut(package, "config/compilation.py", "CUDAGraphMode", enum=enum).CUDAGraphMode
        self.descriptor = cut(package, "forward_context.py", "BatchDescriptor", dataclass=dataclass).BatchDescriptor
        self.captured_lora_counts = cut(package, "lora/utils.py", "get_captured_lora_counts").get_captured_lora_counts
        self.dispatcher_class = cut(
            package,
            "v1/cudagraph_dispatcher.py",
            "CudagraphDispatcher",
            CUDAGraphMode=self.mode,
            BatchDescriptor=self.descriptor,
            replace=replace,
            product=product,
            bisect=bisect,
            get_captured_lora_counts=self.captured_lora_counts,
            is_breakable_cudagraph_enabled=lambda: False,
        ).CudagraphDispatcher

    def vllm_config(self, config: GraphConfig, *, specialize_lora: bool = False, max_loras: int = 0) -> SimpleNamespace:
        """The settings as vLLM holds them. LoRA counts are vLLM's own of the two flags, not those of `config`."""
        sizes = list(config.capture_sizes.sizes)
        lora = SimpleNamespace(max_loras=max_loras, specialize_active_lora=specialize_lora) if max_loras else None
        drafts = config.query_len - 1
        return SimpleNamespace(
            compilation_config=SimpleNamespace(
                cudagraph_mode=self.mode[config.capture_mode.name],
                cudagraph_capture_sizes=sizes,
                max_cudagraph_capture_size=config.capture_sizes.largest,
                compile_sizes=[],
                cudagraph_specialize_lora=0 in config.lora.counts,
                is_attention_compiled_piecewise=lambda: True,
            ),
            scheduler_config=SimpleNamespace(max_num_seqs=config.max_num_seqs),
            cache_config=SimpleNamespace(use_kda_recoverssm=False),
            speculative_config=SimpleNamespace(
                num_speculative_tokens=drafts, uses_dynamic_speculative_decoding=lambda: False, method="eagle"
            )
            if drafts
            else None,
            num_speculative_tokens=drafts,
            lora_config=lora,
            observability_config=SimpleNamespace(cudagraph_metrics=False),
            model_config=SimpleNamespace(is_encoder_decoder=False),
        )

    def dispatcher(self, vllm_config: SimpleNamespace) -> SimpleNamespace:
        """A `CudagraphDispatcher` whose graphs are captured."""
        dispatcher = self.dispatcher_class(vllm_config)
        dispatcher.initialize_cudagraph_keys(
            vllm_config.compilation_config.cudagraph_mode, dispatcher.uniform_decode_query_len
        )
        return dispatcher

    def rounded_sizes(self, sizes: tuple[int, ...], query_len: int, sequence_parallel_size: int = 1) -> list[int]:
        """What `adjust_cudagraph_sizes_for_spec_decode` makes of the sizes."""
        adjust = cut(
            self.package,
            "config/compilation.py",
            "CompilationConfig.adjust_cudagraph_sizes_for_spec_decode",
            round_up=round_up_as_vllm,
        ).adjust_cudagraph_sizes_for_spec_decode
        compilation = SimpleNamespace(
            cudagraph_capture_sizes=list(sizes),
            max_cudagraph_capture_size=sizes[-1],
            pass_config=SimpleNamespace(enable_sp=sequence_parallel_size > 1),
        )
        tensor_parallel = [sequence_parallel_size] if "tensor_parallel_size" in adjust.__code__.co_varnames else []
        adjust(compilation, query_len, *tensor_parallel)
        assert compilation.max_cudagraph_capture_size == compilation.cudagraph_capture_sizes[-1]
        return compilation.cudagraph_capture_sizes

    def size_setter(self, *, blackwell: bool = False) -> Callable[[SimpleNamespace], None]:
        """`_set_cudagraph_sizes`, to be called with a stand-in of `VllmConfig`."""
        platform = SimpleNamespace(is_device_capability_family=lambda family: blackwell and family == 100)
        dynamic = _cut_if_there(
            self.package,
            "v1/spec_decode/dynamic/utils.py",
            "validate_and_normalize_dynamic_sd_schedule",
            "build_dynamic_sd_schedule_lookup",
            DynamicSDSchedule=None,
        )
        return cut(
            self.package,
            "config/vllm.py",
            "VllmConfig._set_cudagraph_sizes",
            CUDAGraphMode=self.mode,
            current_platform=platform,
            logger=QuietLogger(),
            **dynamic,
        )._set_cudagraph_sizes

    def v1_runner_class(self) -> type:
        """A class with the methods of `GPUModelRunner` that choose a graph, with `self.reduce` as the network."""
        ubatches = cut(self.package, "v1/worker/ubatch_utils.py", "is_last_ubatch_empty", "check_ubatch_thresholds")
        data_parallel = cut(
            self.package,
            "v1/worker/dp_utils.py",
            "_get_device_and_group",
            "_run_ar",
            "_post_process_ubatch",
            "_post_process_dp_padding",
            "_post_process_cudagraph_mode",
            "_synchronize_dp_ranks",
            "coordinate_batch_across_dp",
            **vars(ubatches),
            torch=torch,
            dist=self.reduce,
            get_dp_group=lambda: self.reduce,
            logger=QuietLogger(),
            PIN_MEMORY=False,
            nullcontext=nullcontext,
            gpu_sync_allowed=nullcontext,
            should_skip_dp_coordination=lambda: False,
        )
        return cut_class(
            self.package,
            "v1/worker/gpu_model_runner.py",
            "GPUModelRunner",
            "_is_uniform_decode",
            "_determine_batch_execution_and_padding",
            base=SimpleNamespace,
            CUDAGraphMode=self.mode,
            BatchDescriptor=self.descriptor,
            coordinate_batch_across_dp=data_parallel.coordinate_batch_across_dp,
        )

    def v2_code(self) -> SimpleNamespace:
        """The V2 runner's manager of graphs and what ranks agree by, with `self.reduce` as the network."""
        ubatches = cut(self.package, "v1/worker/ubatch_utils.py", "check_ubatch_thresholds", "get_num_ubatches")
        dynamic = cut(
            self.package,
            "v1/spec_decode/dynamic/utils.py",
            "validate_and_normalize_dynamic_sd_schedule",
            "build_dynamic_sd_schedule_lookup",
        )
        one_rank = SimpleNamespace(is_first_rank=True, is_last_rank=True)
        manager = cut(
            self.package,
            "v1/worker/gpu/cudagraph_utils.py",
            "BatchExecutionDescriptor",
            "_is_compatible",
            "CudaGraphManager",
            **vars(ubatches),
            CUDAGraphMode=self.mode,
            torch=torch,
            dataclass=dataclass,
            replace=replace,
            product=product,
            groupby=groupby,
            defaultdict=defaultdict,
            round_up=round_up_as_vllm,
            build_dynamic_sd_schedule_lookup=dynamic.build_dynamic_sd_schedule_lookup,
            get_pp_group=lambda: one_rank,
            current_platform=SimpleNamespace(get_global_graph_pool=lambda: None),
            is_breakable_cudagraph_enabled=lambda: False,
        )
        ranks = cut(
            self.package,
            "v1/worker/gpu/dp_utils.py",
            "DPSyncState",
            "sync_cudagraph_and_dp_padding",
            "dispatch_cg_and_sync_dp",
            **vars(ubatches),
            **vars(manager),
            CUDAGraphMode=self.mode,
            torch=torch,
            dataclass=dataclass,
            replace=replace,
            dist=self.reduce,
            get_dp_group=lambda: self.reduce,
            should_skip_dp_coordination=lambda: False,
        )
        counts = cut(self.package, "v1/worker/utils.py", "is_uniform_query_len", "get_uniform_decode_token_count")
        return SimpleNamespace(**vars(manager), **vars(ranks), **vars(counts))


def round_up_as_vllm(count: int, multiple: int) -> int:
    return ((count + multiple - 1) // multiple) * multiple


def _cut_if_there(package: Path, module: str, *names: str, **stand_ins: object) -> dict[str, object]:
    return vars(cut(package, module, *names, **stand_ins)) if (package / module).exists() else {}
