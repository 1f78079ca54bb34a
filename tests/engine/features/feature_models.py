# SPDX-License-Identifier: Apache-2.0
"""Models of a few thousand random weights, made on the spot: one per kind of model the features need.

The same weights each time. Weights are drawn large enough that every token's row differs clearly.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 512
_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16384,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def llama(directory: Path, dtype=torch.float32, attention_scale: float = 1.0) -> str:
    """Full attention, with a tokenizer of its own: one token per printable character.

    With little attention the next token depends mostly on the last one, so greedy outputs fall into loops, which an
    n-gram drafter predicts; every row still depends on its whole prefix.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(20)
    model = LlamaForCausalLM(LlamaConfig(**_SIZES)).to(dtype)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= attention_scale
    model.save_pretrained(directory)
    _save_tokenizer(directory)
    return str(directory)


def mistral_sliding_window(directory: Path, dtype=torch.float32) -> str:
    """Every layer attends to a window only."""
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(21)
    MistralForCausalLM(MistralConfig(**_SIZES, sliding_window=64, head_dim=32)).to(dtype).save_pretrained(directory)
    return str(directory)


def gemma3(directory: Path, dtype=torch.float32) -> str:
    """Three layers with a window and one with full attention."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(22)
    sizes = _SIZES | {"num_hidden_layers": 4}
    config = Gemma3TextConfig(
        **sizes, head_dim=32, sliding_window=64, layer_types=["sliding_attention"] * 3 + ["full_attention"]
    )
    Gemma3ForCausalLM(config).to(dtype).save_pretrained(directory)
    return str(directory)


def qwen3_next(directory: Path, dtype=torch.bfloat16) -> str:
    """Three linear-attention layers, which keep a state, and one with full attention."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    torch.manual_seed(23)
    sizes = _SIZES | {"num_hidden_layers": 4}
    config = Qwen3NextConfig(
        **sizes,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        decoder_sparse_step=1,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
    )
    Qwen3NextForCausalLM(config).to(dtype).save_pretrained(directory)
    return str(directory)


def deepseek_v2(directory: Path, dtype=torch.bfloat16) -> str:
    """Latent attention: one compressed KV row per token, in blocks as full attention has them."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    torch.manual_seed(25)
    config = DeepseekV2Config(
        **_SIZES,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        v_head_dim=64,
        first_k_dense_replace=2,
        n_routed_experts=4,
        n_shared_experts=1,
        moe_intermediate_size=64,
        num_experts_per_tok=2,
    )
    DeepseekV2ForCausalLM(config).to(dtype).save_pretrained(directory)
    return str(directory)


def lora_adapter(directory: Path, seed: int, rank: int = 8) -> str:
    """An adapter for `llama` that changes the rows of every token."""
    directory.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(_SIZES["num_hidden_layers"]):
        for name, width in (("q_proj", 128), ("v_proj", 64)):
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(rank, 128, generator=generator) * 0.2
            tensors[f"{stem}.lora_B.weight"] = torch.randn(width, rank, generator=generator) * 0.2
    save_file(tensors, directory / "adapter_model.safetensors")
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "llama",
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["q_proj", "v_proj"],
    }
    (directory / "adapter_config.json").write_text(json.dumps(described))
    return str(directory)


def idefics3(directory: Path, dtype=torch.float32) -> str:
    """Text and pictures; a picture stands for 36 tokens between two markers, which is no whole number of blocks."""
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    torch.manual_seed(24)
    tokenizer = _save_tokenizer(directory)
    vision = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 96,
        "patch_size": 8,
        "initializer_range": 0.2,
    }
    config = Idefics3Config(
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        vision_config=vision,
        text_config=_SIZES | {"model_type": "llama"},
        scale_factor=2,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    config.bos_token_id, config.eos_token_id = 0, 1
    Idefics3ForConditionalGeneration(config).to(dtype).save_pretrained(directory)
    pictures = Idefics3ImageProcessorPil(
        size={"longest_edge": 96}, max_image_size={"longest_edge": 96}, do_image_splitting=False
    )
    Idefics3Processor(pictures, tokenizer, image_seq_len=36).save_pretrained(directory)
    return str(directory)


def _save_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    """One token per printable character, and the markers an Idefics 3 prompt needs."""
    markers = ["<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>"]
    markers += [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    names = ["<s>", "</s>", "<unk>", *map(chr, range(32, 127)), "\n", *markers]
    names += [f"<{index}>" for index in range(len(names), VOCAB_SIZE)]
    tokenizer = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<s>",
        additional_special_tokens=markers,
    )
    wrapped.save_pretrained(directory)
    return wrapped
