# SPDX-License-Identifier: Apache-2.0
"""What one token takes in vLLM's KV cache, by the model's configuration; where that does not tell, it is not guessed.

The arithmetic is vLLM's (0.32: `FullAttentionSpec` and `MLAAttentionSpec` in `v1/kv_cache_interface.py`,
`get_kv_cache_config_from_groups` in `v1/core/kv_cache_utils.py`, `get_num_kv_heads` in `config/model.py`; heads and
their size: `transformers_utils/model_arch_config_convertor.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omni_core.cli.plan.config_fields import ConfigFields
from omni_core.cli.plan.errors import PlanInputError

_KV_HEADS = ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num", "num_attention_groups")
"""In the order of vLLM's `get_total_num_kv_heads`."""
_FALCON = frozenset({"falcon", "RefinedWeb", "RefinedWebModel"})
"""Model types of `FalconModelArchConfigConvertor`: one KV head under `multi_query`."""
_LATENT_MODEL_TYPES = frozenset(
    {
        "axk1",
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "deepseek_mtp",
        "glm4_moe_lite",
        "glm4_moe_lite_mtp",
        "glm_moe_dsa",
        "kimi_k2",
        "pangu_ultra_moe",
        "pangu_ultra_moe_mtp",
    }
)
"""Model types with latent attention (`is_deepseek_mla`), without those whose layers are of several kinds."""
_OTHER_LAYERS = {
    "full_attention_interval": "not all layers are attention",
    "attn_layer_period": "not all layers are attention",
    "attn_layer_indices": "not all layers are attention",
    "hybrid_override_pattern": "not all layers are attention",
    "hybrid_layer_pattern": "some layers have a sliding window (vLLM: models/mimo_v2.py)",
    "hybrid_layer_ids": "not all layers are attention (vLLM: models/zamba2.py)",
    "layers_block_type": "not all layers are attention",
    "mamba_d_state": "not all layers are attention",
    "mamba_step": "not all layers are attention",
    # configs/kimi_linear.py: the layers of kda_layers keep a state.
    "linear_attn_config": "some layers keep a state in place of a KV cache",
    # config/model.py, get_num_layers_by_block_type: only those of type 1 are attention.
    "attn_type_list": "not all layers are attention",
    "block_types": "not all layers are attention",
    "full_attn_idxs": "not all layers are attention",
    # models/llama4.py makes ChunkedLocalAttention of all layers that rotate positions.
    "attention_chunk_size": "some layers attend to chunks, whose KV cache vLLM groups in its own way",
    # models/deepseek_v2.py, DeepseekV32IndexerCache: a second cache in each layer.
    "index_head_dim": "each layer has an indexer with a cache of its own",
    # attention.py of DeepSeek V4: compressed caches beside the sliding one.
    "compress_ratios": "layers keep compressed KV caches",
    # v1/kv_cache_interface.py, CrossAttentionSpec.
    "is_encoder_decoder": "it has cross attention, whose KV cache holds the encoder's states",
    # models/gemma3n.py: the last layers use the cache of earlier ones.
    "num_kv_shared_layers": "some layers have no KV cache of their own",
    # config/model.py, has_noops; NemotronNasModelArchConfigConvertor.
    "block_configs": "layers differ, and some have no attention",
}
"""Field → what it says if it is set."""


@dataclass(frozen=True, slots=True)
class Parallel:
    """How the engine splits the model over ranks."""

    tensor_size: int = 1
    pipeline_size: int = 1


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The attention layers of one stage."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    latent_size: int | None
    """Elements of a token's KV entry under latent attention (`kv_lora_rank + qk_rope_head_dim`); `None`: not used."""
    not_sized: str | None
    """Why the KV cache cannot be sized from the configuration, or `None`."""

    def elements_per_token(self, parallel: Parallel) -> int:
        """Elements of one token in the KV cache of the rank with the most layers.

        Raises:
            PlanInputError: vLLM does not split the model so.
        """
        if self.num_heads % parallel.tensor_size:
            raise PlanInputError(
                f"--tensor-parallel-size {parallel.tensor_size}: vLLM wants it to divide the {self.num_heads} heads"
            )
        if parallel.pipeline_size > self.num_layers:
            raise PlanInputError(
                f"--pipeline-parallel-size {parallel.pipeline_size}: there are {self.num_layers} layers"
            )
        if self.latent_size is not None:
            elements = self.latent_size
        else:
            elements = 2 * max(1, self.num_kv_heads // parallel.tensor_size) * self.head_size
        return -(-self.num_layers // parallel.pipeline_size) * elements


def read_kv_layout(fields: ConfigFields, root: Mapping[str, Any]) -> KVLayout:
    """The attention layers that a stage's part describes.

    Args:
        fields: the stage's part.
        root: the whole configuration; vLLM reads some fields there.

    Raises:
        PlanInputError: a field has a value of another kind.
    """
    heads = fields.needed_count("num_attention_heads")
    rank = fields.count_or_zero("kv_lora_rank")
    rope = fields.count_or_zero("qk_rope_head_dim")
    head_size = (
        fields.count_or_zero("head_dim")
        or fields.count_or_zero("hidden_size_per_head")
        or fields.needed_count("hidden_size") // heads
    )
    if head_size == 0:
        raise fields.wrong("hidden_size", f"at least num_attention_heads, which is {heads}")
    return KVLayout(
        num_layers=fields.needed_count("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=_num_kv_heads(fields, heads),
        head_size=head_size,
        latent_size=rank + rope if rank else None,
        not_sized=_not_sized(fields, root, is_latent=rank > 0),
    )


def _num_kv_heads(fields: ConfigFields, heads: int) -> int:
    section = fields.section
    is_falcon = fields.word("model_type") in _FALCON
    if is_falcon and section.get("multi_query") and not section.get("new_decoder_architecture"):
        return 1
    return next((count for name in _KV_HEADS if (count := fields.count(name)) is not None), heads)


def _not_sized(fields: ConfigFields, root: Mapping[str, Any], *, is_latent: bool) -> str | None:
    section = fields.section
    layer_types = fields.words("layer_types")
    kinds = set(layer_types) - {"full_attention"}
    if kinds:
        return f"layers are also of {', '.join(sorted(kinds))}, whose KV cache vLLM groups and pads in its own way"
    for name, meaning in _OTHER_LAYERS.items():
        if section.get(name) or root.get(name):
            return f"{name} says that {meaning}"
    if section.get("sliding_window") and section.get("use_sliding_window", True) and not layer_types:
        return "it has a sliding window"
    model_type = fields.word("model_type")
    if is_latent and model_type is not None and model_type not in _LATENT_MODEL_TYPES:
        return f"it has kv_lora_rank, but model type {model_type!r} is not one of those known to keep latent KV entries"
    if not is_latent and section.get("v_head_dim"):
        return "v_head_dim says that keys and values differ in size"
    return None
