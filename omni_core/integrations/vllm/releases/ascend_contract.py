# SPDX-License-Identifier: Apache-2.0
"""What this integration rests on in vLLM-Ascend, as data: its worker, and what its first model runner has of its own.

Read in vLLM-Ascend 0.18.0 and 0.23.0, never run. Paths are below the `vllm_ascend` package. Its runner extends vLLM's
first one and keeps the names that `runners/v1.py` reads; what a step leaves behind has other fields beside them.
"""

from __future__ import annotations

from omni_core.integrations.vllm.releases.engine_contract import extends, has, says, takes

_WORKER = "worker/worker.py"
_RUNNER = "worker/model_runner_v1.py"
_BATCH = "worker/npu_input_batch.py"
_TABLE = "worker/block_table.py"

ASCEND_CONTRACT = (
    extends(_WORKER, "NPUWorker", "WorkerBase"),
    takes(_WORKER, "NPUWorker", "init_device"),
    takes(_WORKER, "NPUWorker", "load_model"),
    takes(_WORKER, "NPUWorker", "initialize_from_config", "kv_cache_config"),
    takes(_WORKER, "NPUWorker", "compile_or_warm_up_model"),
    takes(_WORKER, "NPUWorker", "execute_model", "scheduler_output"),
    takes(_WORKER, "NPUWorker", "sample_tokens", "grammar_output"),
    takes(_WORKER, "NPUWorker", "sleep", "level"),
    takes(_WORKER, "NPUWorker", "wake_up", "tags"),
    takes(_WORKER, "NPUWorker", "add_lora", "lora_request"),
    takes(_WORKER, "NPUWorker", "remove_lora", "lora_id"),
    *has(_WORKER, "NPUWorker", "use_v2_model_runner", "model_runner", "device"),
    extends(_RUNNER, "NPUModelRunner", "GPUModelRunner"),
    takes(_RUNNER, "NPUModelRunner", "execute_model", "scheduler_output", "intermediate_tensors"),
    takes(_RUNNER, "NPUModelRunner", "sample_tokens", "grammar_output"),
    says(_RUNNER, "NPUModelRunner", "sample_tokens", "self.execute_model_state = None"),
    says(_RUNNER, "NPUModelRunner", "sample_tokens", "AsyncGPUModelRunnerOutput("),
    says(_RUNNER, "NPUModelRunner", "_bookkeeping_sync", "sampled_ids = [-1] if"),
    *has(_RUNNER, "NPUModelRunner", "execute_model_state"),
    *has(_RUNNER, "ExecuteModelState", "hidden_states", "aux_hidden_states"),
    extends(_BATCH, "NPUInputBatch", "InputBatch"),
    *has(_BATCH, "NPUInputBatch", "block_table", "token_ids_cpu", "is_token_ids", "num_computed_tokens_cpu"),
    *has(_TABLE, "BlockTable", "block_size", "num_blocks_per_row", "block_table"),
    takes(_TABLE, "MultiGroupBlockTable", "__getitem__", "idx"),
    # Blocks of the scheduler's are split into the attention kernel's, and ids with them: slots stay the same.
    says(_TABLE, "BlockTable", "_convert_physical_to_logical_blocks", "phys_block * self.blocks_per_phys_block"),
)
