# SPDX-License-Identifier: Apache-2.0
"""What `config.json` of real models says of their stages, shortened to what decides sizes."""

import json

QWEN3_OMNI_30B_A3B = {
    "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
    "dtype": "bfloat16",
    "thinker_config": {
        "audio_config": {"d_model": 1280, "encoder_layers": 32, "num_hidden_layers": 32, "num_mel_bins": 128},
        "vision_config": {"depth": 27, "hidden_size": 1152, "num_heads": 16, "patch_size": 16},
        "text_config": {
            "hidden_size": 2048,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "sliding_window": None,
            "dtype": None,
        },
    },
    "talker_config": {
        "text_config": {
            "hidden_size": 1024,
            "num_hidden_layers": 20,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "sliding_window": None,
            "use_sliding_window": False,
            "dtype": None,
        },
        "code_predictor_config": {
            "hidden_size": 1024,
            "num_hidden_layers": 5,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "layer_types": ["full_attention"] * 5,
        },
    },
    "code2wav_config": {"hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16, "num_quantizers": 16},
}
SMOLLM2_135M = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "hidden_size": 2048,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16",
}
THINKER = "thinker_config.text_config"
TALKER = "talker_config.text_config"


def write_model(folder, config):
    """A model's folder that holds its configuration and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)
