# SPDX-License-Identifier: Apache-2.0
"""A Llama of a few thousand weights that also emits a second output per token, made on the spot."""

import json
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import ModelRegistry
from vllm.model_executor.models.llama import LlamaForCausalLM as VllmLlama

ARCHITECTURE = "TwoOutputLlamaForCausalLM"
VOCAB_SIZE = 512
CODES_KEY = "talker.codes"
CODES_SHAPE = (4, 3)


class TwoOutputLlama(VllmLlama):
    """Emits `talker.codes`, an int32 tensor of shape `(num_tokens, 4, 3)`, beside its hidden state.

    The codes are made element by element, so they depend on nothing else in the batch.
    """

    def forward(self, *args, **kwargs):
        hidden_states = super().forward(*args, **kwargs)
        if isinstance(hidden_states, torch.Tensor):  # a pipeline's earlier ranks hand on intermediate tensors
            self._codes = (hidden_states[:, :12].float() * 1024).to(torch.int32).view(-1, *CODES_SHAPE)
        return hidden_states

    def take_stage_outputs(self):
        codes, self._codes = self._codes, None
        return {"talker": {"codes": codes}, "note": "the whole value goes to every request"}


def save_tiny_model(directory: Path) -> str:
    """Save the model with random weights; the same weights each time."""
    torch.manual_seed(20)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.2,  # large enough that every token's row differs clearly
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(directory)
    described = json.loads((directory / "config.json").read_text())
    described["architectures"] = [ARCHITECTURE]
    (directory / "config.json").write_text(json.dumps(described))
    register_tiny_model()
    return str(directory)


def register_tiny_model() -> None:
    """Tell vLLM in this process of the architecture; in an engine's other processes, a plugin of vLLM's calls it."""
    ModelRegistry.register_model(ARCHITECTURE, TwoOutputLlama)
