# SPDX-License-Identifier: Apache-2.0
"""`omni-core bench vllm` on a real vLLM with a very small Llama: every engine and load once, form only."""

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

MAKE_MODEL = """
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(5)
config = LlamaConfig(
    vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=1024, bos_token_id=0, eos_token_id=1, tie_word_embeddings=False,
)
LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(sys.argv[1])
"""
ENGINES = [
    "prefix caching off",
    "on, without Omni Core",
    "on, Omni Core, memory sink",
    "on, Omni Core, safetensors sink",
]
PREFIX_TOKENS, OWN_TOKENS, NUM_REQUESTS = 64, 8, 2  # of a quick run


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    model = tmp_path_factory.mktemp("model")
    subprocess.run([sys.executable, "-c", MAKE_MODEL, str(model)], check=True, capture_output=True)
    done = subprocess.run(
        [sys.executable, "-m", "omni_core.cli.main", "bench", "vllm", "--quick", "--model", model, "--format", "json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_engine_runs_every_load(document):
    assert [(row["load"], row["concurrency"], row["engine"]) for row in document["rows"]] == [
        (load, concurrency, engine) for load in ("reuse", "no reuse") for concurrency in (1, 8) for engine in ENGINES
    ]
    for row in document["rows"]:
        assert row["requests"] == NUM_REQUESTS
        assert row["tokens_per_s"] > 0
        assert 0 < row["ttft_ms"] < row["end_to_end_ms"]
        assert row["tpot_ms"] > 0


def test_omni_core_leaves_the_prefill_to_the_prefix_cache(document):
    """With it an engine computes what plain prefix caching computes: less than without, where prompts share."""
    all_tokens = NUM_REQUESTS * (PREFIX_TOKENS + OWN_TOKENS)
    for row in document["rows"]:
        skips = row["load"] == "reuse" and row["engine"] != "prefix caching off"
        assert row["prefill_tokens"] * NUM_REQUESTS == all_tokens - (PREFIX_TOKENS if skips else 0)
        assert row.get("prefill_tokens_off_plain", 0) == 0
    assert sum("prefill_tokens_off_plain" in row for row in document["rows"]) == 8
