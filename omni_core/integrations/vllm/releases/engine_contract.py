# SPDX-License-Identifier: Apache-2.0
"""What of vLLM this integration rests on, as data: every name it reads, calls, overrides or sets, once.

What it rests on in the second model runner is in `v2_contract.py`, and in vLLM-Ascend in `ascend_contract.py`.

`engine_sources.py` reads a vLLM's source text and says which of these facts it lacks: at start for the vLLM that runs,
in tests for any wheel. A vLLM that changed one of them is refused by that name, before its model is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

Release: TypeAlias = tuple[int, int]
"""Major and minor version."""

FIRST_RELEASE: Release = (0, 27)
"""The oldest that was run."""
FIRST_RELEASE_READ: Release = (0, 18)
"""The oldest that was read: vLLM-Ascend 0.18 goes with it. Between it and the first that was run, 0.23 was read."""


class FactKind(Enum):
    """What is said of an owner's name."""

    MEMBER = "has"
    """A class has it: a field, a method, a property, or an attribute that a method sets. A module defines it."""
    CALL = "takes"
    """A function or method whose first parameters, `self` aside, have these names in this order."""
    BASE = "extends"
    """A class names it among its bases."""
    EXPORT = "gives"
    """A module imports it, so that it can be asked of the module."""
    EXPRESSION = "says"
    """A function or method contains this expression or statement, in the form `ast.unparse` gives it."""


@dataclass(frozen=True, slots=True)
class EngineFact:
    """One fact of vLLM's source text."""

    module: str
    """Path below the package, which is `vllm` unless the contract says otherwise."""
    owner: str | None
    """A class of the module; `None` for the module itself."""
    name: str
    kind: FactKind = FactKind.MEMBER
    detail: tuple[str, ...] = ()
    """Of a call, its parameters; of an expression, that one."""
    since: Release = FIRST_RELEASE_READ
    """The first release read that has it; what older ones do instead stands in `versions.py`."""

    def __str__(self) -> str:
        where = self.module if self.owner is None else f"{self.module}: {self.owner}"
        detail = f" ({', '.join(self.detail)})" if self.detail else ""
        return f"{where} {self.kind.value} {self.name}{detail}"


def has(module: str, owner: str | None, *names: str, since: Release = FIRST_RELEASE_READ) -> tuple[EngineFact, ...]:
    """Facts of `FactKind.MEMBER`."""
    return tuple(EngineFact(module, owner, name, since=since) for name in names)


def takes(
    module: str, owner: str | None, name: str, *parameters: str, since: Release = FIRST_RELEASE_READ
) -> EngineFact:
    """A fact of `FactKind.CALL`."""
    return EngineFact(module, owner, name, FactKind.CALL, parameters, since)


def says(module: str, owner: str | None, name: str, expression: str, since: Release = FIRST_RELEASE_READ) -> EngineFact:
    """A fact of `FactKind.EXPRESSION`."""
    return EngineFact(module, owner, name, FactKind.EXPRESSION, (expression,), since)


def extends(module: str, owner: str, base: str) -> EngineFact:
    """A fact of `FactKind.BASE`."""
    return EngineFact(module, owner, base, FactKind.BASE)


_OUTPUT = "v1/core/sched/output.py"
_RUNNER = "v1/worker/gpu_model_runner.py"
_CPU_RUNNER = "v1/worker/cpu_model_runner.py"
_BATCH = "v1/worker/gpu_input_batch.py"
_TABLE = "v1/worker/block_table.py"
_WORKER = "v1/worker/gpu_worker.py"
_CPU_WORKER = "v1/worker/cpu_worker.py"
_KV = "v1/kv_cache_interface.py"
_PARALLEL = "distributed/parallel_state.py"

SCHEDULER_OUTPUT = (
    *has(_OUTPUT, "NewRequestData", "req_id", "prompt_token_ids", "prefill_token_ids", "block_ids"),
    *has(_OUTPUT, "NewRequestData", "num_computed_tokens", "prompt_embeds", "lora_request", "mm_features"),
    *has(_OUTPUT, "NewRequestData", "prompt_is_token_ids", since=(0, 23)),
    *has(_OUTPUT, "NewRequestData", "sampling_params"),
    *has(_OUTPUT, "CachedRequestData", "req_ids", "resumed_req_ids", "all_token_ids", "new_block_ids"),
    *has(_OUTPUT, "CachedRequestData", "num_computed_tokens"),
    *has(_OUTPUT, "SchedulerOutput", "scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens"),
    *has(_OUTPUT, "SchedulerOutput", "total_num_scheduled_tokens", "finished_req_ids"),
    *has(_OUTPUT, "SchedulerOutput", "scheduled_spec_decode_tokens", "preempted_req_ids"),
    *has(_OUTPUT, "SchedulerOutput", "kv_cache_block_copies", since=(0, 27)),
    *has("lora/request.py", "LoRARequest", "lora_int_id", "lora_name"),
    *has("multimodal/inputs.py", "MultiModalFeatureSpec", "identifier", "mm_position"),
    *has("multimodal/inputs.py", "PlaceholderRange", "offset", "length"),
    *has("v1/core/kv_cache_utils.py", "KVCacheBlockCopy", "src_block_id", "dst_block_id", since=(0, 27)),
)
"""What a step brings, read by `step_events.py`, `tap.py` and `tapped_request.py`."""

MODEL_RUNNER = (
    extends(_CPU_RUNNER, "CPUModelRunner", "GPUModelRunner"),
    *has(_CPU_RUNNER, "CPUModelRunner", "get_model"),
    takes(_RUNNER, "GPUModelRunner", "execute_model", "scheduler_output"),
    takes(_RUNNER, "GPUModelRunner", "sample_tokens", "grammar_output"),
    says(_RUNNER, "GPUModelRunner", "sample_tokens", "self.execute_model_state = None"),
    *has(_RUNNER, "GPUModelRunner", "execute_model_state", "input_batch", "requests", "max_model_len", "device"),
    *has(_RUNNER, "GPUModelRunner", "query_start_loc", "input_ids", "positions", "is_pooling_model"),
    *has(_RUNNER, "GPUModelRunner", "use_aux_hidden_state_outputs", "parallel_config"),
    *has(_RUNNER, "ExecuteModelState", "hidden_states", "aux_hidden_states"),
    *has(_BATCH, "InputBatch", "req_ids", "block_table", "num_computed_tokens_cpu", "token_ids_cpu", "is_token_ids"),
    *has(_BATCH, "CachedRequestState", "output_token_ids", "sampling_params", "num_prompt_tokens"),
    *has(_TABLE, "BlockTable", "block_size", "num_blocks_per_row", "block_table"),
    takes(_TABLE, "MultiGroupBlockTable", "__getitem__", "idx"),
    *has("v1/utils.py", "CpuGpuBuffer", "np", "gpu"),
    *has("v1/outputs.py", "ModelRunnerOutput", "sampled_token_ids", "req_id_to_index"),
    *has(
        "sampling_params.py", "SamplingParams", "max_tokens", "eos_token_id", "stop_token_ids", "repetition_detection"
    ),
    takes("v1/core/sched/utils.py", None, "check_stop", "request", "max_model_len"),
    # Asynchronous scheduling: what was sampled is told later, and -1 stands for it meanwhile.
    extends(_RUNNER, "AsyncGPUModelRunnerOutput", "AsyncModelRunnerOutput"),
    takes(_RUNNER, "AsyncGPUModelRunnerOutput", "get_output"),
    takes("v1/outputs.py", "AsyncModelRunnerOutput", "get_output"),
    says(_RUNNER, "GPUModelRunner", "_bookkeeping_sync", "sampled_ids = [-1] if"),
    says(
        "v1/executor/multiproc_executor.py",
        "WorkerProc",
        "enqueue_output",
        "isinstance(output, AsyncModelRunnerOutput)",
    ),
    # A forward that is replayed as one graph gives the capture's own buffers back.
    says("compilation/cuda_graph.py", "CUDAGraphWrapper", "__call__", "return entry.output"),
    takes("model_executor/models/interfaces.py", "SupportsEagle3", "set_aux_hidden_state_layers", "layers"),
)
"""What a step leaves behind, read by `versions.py`, `step_hooks.py`, `accepted_tokens.py` and `chosen_layers.py`."""

WORKER = (
    extends(_CPU_WORKER, "CPUWorker", "Worker"),
    extends(_WORKER, "Worker", "WorkerBase"),
    takes(_CPU_WORKER, "CPUWorker", "init_device"),
    takes(_WORKER, "Worker", "load_model"),
    takes(_WORKER, "Worker", "initialize_from_config", "kv_cache_config"),
    takes(_WORKER, "Worker", "compile_or_warm_up_model"),
    takes(_WORKER, "Worker", "shutdown"),
    *has(_WORKER, "Worker", "use_v2_model_runner", "model_runner"),
    *has("v1/worker/worker_base.py", "WorkerBase", "vllm_config", "rank"),
    *has(_PARALLEL, None, "get_pp_group", "get_tp_group", "get_pcp_group"),
    *has(_PARALLEL, "GroupCoordinator", "is_last_rank", "rank_in_group"),
)
"""What a worker class overrides or asks."""

CHANGED_WEIGHTS = (
    takes(_WORKER, "Worker", "reload_weights"),
    takes(_WORKER, "Worker", "start_weight_update", since=(0, 23)),
    takes(_WORKER, "Worker", "start_draft_weight_update", since=(0, 27)),
    takes(_WORKER, "Worker", "update_weights", "update_info"),
    takes(_WORKER, "Worker", "finish_weight_update", since=(0, 23)),
    takes(_WORKER, "Worker", "reset_weights", since=(0, 32)),
    takes(_WORKER, "Worker", "sleep", "level"),
    takes(_WORKER, "Worker", "wake_up", "tags"),
    takes(_WORKER, "Worker", "discard", "tags", since=(0, 31)),
    takes(_CPU_WORKER, "CPUWorker", "sleep", "level"),
    takes(_CPU_WORKER, "CPUWorker", "wake_up", "tags"),
    says("v1/engine/core.py", "EngineCore", "sleep", "clear_prefix_cache = level >= 1"),
    takes("v1/core/sched/scheduler.py", "Scheduler", "reset_prefix_cache", "reset_running_requests"),
    says("v1/core/block_pool.py", "BlockPool", "reset_prefix_cache", "block.reset_hash()"),
    takes(_WORKER, "Worker", "add_lora", "lora_request"),
    takes(_WORKER, "Worker", "remove_lora", "lora_id"),
    *has(_RUNNER, "GPUModelRunner", "lora_config"),
    takes("v1/worker/lora_model_runner_mixin.py", "LoRAModelRunnerMixin", "list_loras"),
    *has(_BATCH, "InputBatch", "lora_id_to_lora_request"),
    *has("lora/request.py", "LoRARequest", "lora_path", "load_inplace"),
    says(
        "lora/worker_manager.py",
        "LRUCacheWorkerLoRAManager",
        "add_adapter",
        "lora_request.lora_int_id not in self.list_adapters() or lora_request.load_inplace",
    ),
)
"""How weights and adapters change and when hashes are forgotten: `changed_weights.py`, `adapter_files.py`."""

CONFIGURATION = (
    *has("config/vllm.py", "VllmConfig", "cache_config", "parallel_config", "scheduler_config", "model_config"),
    *has("config/vllm.py", "VllmConfig", "kv_transfer_config", "speculative_config", "kernel_config"),
    *has("config/vllm.py", "VllmConfig", "additional_config", "device_config", "compilation_config"),
    *has("config/device.py", "DeviceConfig", "device_type"),
    *has("config/compilation.py", "CompilationConfig", "cudagraph_mode"),
    takes("config/compilation.py", "CUDAGraphMode", "has_full_cudagraphs"),
    *has("config/cache.py", "CacheConfig", "enable_prefix_caching", "kv_sharing_fast_prefill"),
    *has("config/cache.py", "CacheConfig", "prefix_match_unit", since=(0, 27)),
    *has("config/parallel.py", "ParallelConfig", "decode_context_parallel_size", "prefill_context_parallel_size"),
    *has("config/parallel.py", "ParallelConfig", "data_parallel_size_local", "pipeline_parallel_size"),
    *has("config/scheduler.py", "SchedulerConfig", "policy", "max_num_batched_tokens", "async_scheduling"),
    *has("config/scheduler.py", "SchedulerConfig", "max_num_seqs"),
    *has("config/model.py", "ModelConfig", "runner_type", "dtype", "get_hidden_size", "get_total_num_hidden_layers"),
    *has("config/model.py", "ModelConfig", "max_model_len"),
    *has("config/model.py", "ModelConfig", "is_diffusion", since=(0, 27)),
    *has("config/speculative.py", "SpeculativeConfig", "num_speculative_tokens", "method", "use_eagle"),
    *has("config/speculative.py", "SpeculativeConfig", "use_eagle_block_drop", since=(0, 30)),
    *has("config/speculative.py", "SpeculativeConfig", "enable_adaptive_verification", since=(0, 28)),
    *has(_KV, "KVCacheGroupSpec", "is_eagle_group", since=(0, 23)),
    says(
        "v1/core/single_type_kv_cache_manager.py",
        "FullAttentionManager",
        "find_longest_cache_hit",
        "hit_length -= min(alignment_tokens, block_size)",
        since=FIRST_RELEASE,
    ),
    *has("config/kv_transfer.py", "KVTransferConfig", "kv_role", "kv_connector"),
    *has("config/kernel.py", "IrOpPriorityConfig", "fused_add_rms_norm", since=(0, 23)),
    *has("config/kernel.py", "KernelConfig", "ir_op_priority", since=(0, 23)),
    *has(_KV, "KVCacheConfig", "num_blocks", "kv_cache_groups"),
    *has(_KV, "KVCacheConfig", "cache_hit_alignment_tokens", since=(0, 32)),
    *has(_KV, "KVCacheGroupSpec", "kv_cache_spec"),
    *has(_KV, "KVCacheSpec", "block_size"),
    *has(_KV, "KVCacheSpec", "prefix_replay_tokens", since=(0, 31)),
    *has(_KV, "KVCacheSpecKind", "FULL_ATTENTION", "MAMBA", since=(0, 23)),
    takes(_KV, None, "get_kv_cache_spec_kind", "kv_cache_spec", since=(0, 23)),
    *has("envs.py", None, "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"),
)
"""What the gate is told, read by `stage_facts.py`, `stage.py`, `effective_block.py` and `versions.py`."""

CLIENT = (
    says("v1/engine/input_processor.py", "InputProcessor", "assign_request_id", "random_uuid():.8"),
    says("v1/engine/parallel_sampling.py", "ParentRequest", "get_child_info", "f'{index}_{self.request_id}'"),
    takes("entrypoints/llm.py", "LLM", "collective_rpc", "method", "timeout", "args"),
    *has("entrypoints/llm.py", "LLM", "llm_engine"),
    *has("v1/engine/llm_engine.py", "LLMEngine", "engine_core", "output_processor"),
    *has("v1/engine/output_processor.py", "OutputProcessor", "request_states"),
    *has("v1/engine/core_client.py", "InprocClient", "engine_core"),
    *has("v1/engine/core.py", "EngineCore", "model_executor"),
    *has("v1/engine/async_llm.py", "AsyncLLM", "engine_core"),
    *has("v1/engine/core_client.py", "MPClient", "core_engines"),
    *has("v1/engine/core_client.py", "AsyncMPClient", "call_utility_all_async", since=(0, 32)),
    takes("v1/engine/core_client.py", "AsyncMPClient", "_call_utility_async", "method"),
    *has("v1/executor/uniproc_executor.py", "UniProcExecutor", "driver_worker"),
    *has("v1/worker/worker_base.py", "WorkerWrapperBase", "worker"),
)
"""What a client's side asks, read by `request_ids.py`, `session.py` and `versions.py`."""

ENGINE_CONTRACT = (
    *SCHEDULER_OUTPUT,
    *MODEL_RUNNER,
    *WORKER,
    *CHANGED_WEIGHTS,
    *CONFIGURATION,
    *CLIENT,
)


def contract_of(release: Release) -> tuple[EngineFact, ...]:
    """The facts a release must have; one that is older than any that was read, those of the oldest."""
    return tuple(fact for fact in ENGINE_CONTRACT if fact.since <= max(release, FIRST_RELEASE_READ))
