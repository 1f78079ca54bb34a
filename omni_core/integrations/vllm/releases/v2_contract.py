# SPDX-License-Identifier: Apache-2.0
"""What this integration rests on in vLLM's second model runner, as data. Read and run as of vLLM 0.32."""

from __future__ import annotations

from omni_core.integrations.vllm.releases.engine_contract import extends, has, says, takes

_RUNNER = "v1/worker/gpu/model_runner.py"
_BATCH = "v1/worker/gpu/input_batch.py"
_TABLES = "v1/worker/gpu/block_table.py"
_OUTPUTS = "v1/worker/gpu/async_utils.py"
_CPU_RUNNER = "v1/worker/cpu/model_runner.py"

V2_CONTRACT = (
    extends(_CPU_RUNNER, "CPUModelRunner", "GPUModelRunner"),
    extends(_RUNNER, "GPUModelRunner", "LoRAModelRunnerMixin"),
    takes(_RUNNER, "GPUModelRunner", "execute_model", "scheduler_output", "intermediate_tensors", "dummy_run"),
    takes(_RUNNER, "GPUModelRunner", "sample_tokens", "grammar_output"),
    takes(_RUNNER, "GPUModelRunner", "get_model"),
    says(_RUNNER, "GPUModelRunner", "sample_tokens", "self.execute_model_state = None"),
    says(_RUNNER, "GPUModelRunner", "sample_tokens", "return async_output"),
    *has(_RUNNER, "GPUModelRunner", "execute_model_state", "block_tables", "max_model_len", "device", "lora_config"),
    *has(_RUNNER, "GPUModelRunner", "is_pooling_model", "use_aux_hidden_state_outputs", "parallel_config"),
    *has(_RUNNER, "ExecuteModelState", "input_batch", "hidden_states", "aux_hidden_states"),
    # What of the news the mirror follows, and in which order.
    says(_RUNNER, "GPUModelRunner", "finish_requests", "finished_req_ids = finished_req_ids.union(preempted_req_ids)"),
    says(
        _RUNNER,
        "GPUModelRunner",
        "add_requests",
        "self.block_tables.append_block_ids(req_index, new_req_data.block_ids, overwrite=True)",
    ),
    says(
        _RUNNER,
        "GPUModelRunner",
        "update_requests",
        "self.block_tables.append_block_ids(req_index, req_new_block_ids, overwrite=False)",
    ),
    takes(_TABLES, "BlockTables", "append_block_ids", "req_index", "new_block_ids", "overwrite"),
    *has(_TABLES, "BlockTables", "num_blocks", "block_sizes"),
    *has("v1/worker/gpu/buffer_utils.py", "UvaBackedTensor", "np"),
    *has(_BATCH, "InputBatch", "req_ids", "num_tokens", "num_scheduled_tokens", "num_computed_tokens_np"),
    *has(_BATCH, "InputBatch", "idx_mapping_np", "query_start_loc_np", "input_ids", "positions"),
    extends(_OUTPUTS, "AsyncOutput", "AsyncModelRunnerOutput"),
    takes(_OUTPUTS, "AsyncOutput", "get_output"),
    says(_OUTPUTS, "AsyncOutput", "get_output", "self.copy_event.synchronize()"),
    # How it is told of requests: one that was preempted comes back among the new ones, with all its tokens.
    says("v1/core/sched/scheduler.py", "Scheduler", "schedule", "scheduled_new_reqs.extend(scheduled_resumed_reqs)"),
    # Its warm-up runs requests of its own making through the worker's calls.
    takes("v1/worker/gpu/warmup.py", None, "warmup_kernels", "model_runner", "worker_execute_model"),
)
"""What a stage with the second model runner needs beside `engine_contract.py`."""
