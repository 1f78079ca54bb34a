# SPDX-License-Identifier: Apache-2.0
"""Runs an example on a real vLLM: `python engine_example.py EXAMPLE.py [ITS ARGUMENTS]`, in an empty directory.

Run by the tests in a process of its own, because importing vllm changes torch for the whole process.
"""

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

MODEL = "path/to/a/model"
HIDDEN_SIZE = 128


def save_model_that_reads_text(directory):
    """A Llama of a few thousand random weights, with one token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(["<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(directory)
    torch.manual_seed(20)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=HIDDEN_SIZE,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(directory)


if __name__ == "__main__":
    save_model_that_reads_text(MODEL)
    example = Path(sys.argv[1])
    sys.argv = sys.argv[1:]
    exec(compile(example.read_text(encoding="utf-8"), str(example), "exec"), {"__name__": "__main__"})
