# SPDX-License-Identifier: Apache-2.0
"""What a diffusion stage is combined with: each runs and gives the pictures of one dense rank, or is refused.

`docs/diffusion-kv-compatibility.md` is written from what the tests of this folder find.
"""

from dataclasses import dataclass, field

PAGED = {
    "diffusion_kv_mode": "paged_scheduler",
    "diffusion_kv_max_rows_per_request": 2,
    "attention_owner": "gathered",
    "kv_cache_memory_bytes": 2**22,
    "enable_prefix_caching": True,
}
KERNEL = {**PAGED, "attention_owner": "kernel"}


@dataclass(frozen=True)
class Combination:
    title: str
    settings: dict = field(default_factory=dict)
    refused: bool = False

    @property
    def num_ranks(self):
        return 1 if self.refused else self.settings.get("tensor_parallel_size", 1) * self.cfg_size

    @property
    def cfg_size(self):
        return self.settings.get("cfg_parallel_size", 1)

    @property
    def caches(self):
        return self.settings.get("enable_prefix_caching", False)

    def deploy(self):
        """A deploy file's content: tiny-hunyuan in its smallest layout."""
        stage = {
            "stage_id": 0,
            "model_options": {"layout": "debug"},
            "block_size": 16,
            "max_num_seqs": 2,
            **self.settings,
        }
        return {"pipeline": "tiny_hunyuan_dit", "stages": [stage]}


COMBINATIONS = {
    "dense": Combination("Dense"),
    "paged": Combination("Paged, gathered pages", {**PAGED, "enable_prefix_caching": False}),
    "gathered": Combination("Paged with prefix caching, gathered pages", PAGED),
    "kernel": Combination("Paged with prefix caching, vLLM's CPU kernel", KERNEL),
    "span_safe": Combination("Hits that end before an image", {**PAGED, "span_safe_hits": True}),
    "bfloat16": Combination(
        "bfloat16, vLLM's CPU kernel", {**KERNEL, "model_options": {"layout": "debug", "dtype": "bfloat16"}}
    ),
    "tp2_dense": Combination("Tensor parallel 2, dense", {"tensor_parallel_size": 2}),
    "tp2_gathered": Combination("Tensor parallel 2, gathered pages", {**PAGED, "tensor_parallel_size": 2}),
    "tp2_kernel": Combination("Tensor parallel 2, vLLM's CPU kernel", {**KERNEL, "tensor_parallel_size": 2}),
    "cfg2_dense": Combination("CFG parallel 2, dense", {"cfg_parallel_size": 2}),
    "cfg2_gathered": Combination("CFG parallel 2, gathered pages", {**PAGED, "cfg_parallel_size": 2}),
    "cfg2_kernel": Combination("CFG parallel 2, vLLM's CPU kernel", {**KERNEL, "cfg_parallel_size": 2}),
    **{
        f"sequence_{kind}": Combination(
            f"Sequence parallel, `{kind}`",
            {**PAGED, "sequence_parallel_kind": kind, "sequence_parallel_size": 2},
            refused=True,
        )
        for kind in ("ulysses", "ulysses_uneven", "ring", "hybrid", "all_gather")
    },
    **{
        name: Combination(title, {**PAGED, **settings}, refused=True)
        for name, title, settings in (
            ("sleep_mode", "Sleep mode", {"enable_sleep_mode": True}),
            ("kv_transfer", "KV connector", {"kv_transfer_config": {"kv_connector": "any"}}),
            ("step_execution", "Requests at different steps in one forward", {"step_execution": True}),
            ("continuous_batching", "Requests that join a running wave", {"continuous_batching": True}),
            ("step_cache", "Caches that skip steps", {"cache_backend": "tea_cache"}),
            ("quantization", "Quantisation", {"quantization": "fp8"}),
            ("cpu_offload", "CPU offload of weights", {"enable_cpu_offload": True}),
        )
    },
}
