# SPDX-License-Identifier: Apache-2.0
"""The whole `omni-core demo` on a real vLLM, with a very small Llama and a tokenizer of single letters."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from omni_core.sinks.safetensors_files import read_request_file, request_files

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

SHARED = "a keeper of a lighthouse wrote down the wind, the waves, the ships and the colour of the sky. " * 2
LETTERS = "abcdefghijklmnopqrstuvwxyz .,"

MAKE_MODEL = f"""
import sys
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

letters = {LETTERS!r}
vocabulary = {{"<s>": 0, "</s>": 1, "<unk>": 2, **{{letter: 3 + at for at, letter in enumerate(letters)}}}}
tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
).save_pretrained(sys.argv[1])
torch.manual_seed(5)
config = LlamaConfig(
    vocab_size=len(vocabulary), hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=1024, bos_token_id=0, eos_token_id=1, tie_word_embeddings=False,
)
LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(sys.argv[1])
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    subprocess.run([sys.executable, "-c", MAKE_MODEL, str(directory)], check=True, capture_output=True)
    return directory


def test_every_row_is_delivered_and_right_and_the_files_hold_them(model, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    lines = [SHARED + "first", {"prompt": SHARED + "the second"}, SHARED + "third"]
    lines.append({"messages": [{"role": "user", "content": "something else"}]})
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "out"
    command = [sys.executable, "-m", "omni_core.cli.main", "demo", "--format", "json", "--max-tokens", "5"]
    done = subprocess.run(
        [*command, "--model", str(model), "--prompts", str(prompts), "--out", str(out)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    document = json.loads(done.stdout)
    assert document["ok"] is True
    assert [wave["requests"] for wave in document["waves"]] == [2, 2]
    assert all(wave["prefill_s_cache_on"] > 0 and wave["prefill_s_cache_off"] > 0 for wave in document["waves"])

    first, second, third, other = document["requests"]
    same_step_hit, stored_hit = second["skipped_tokens"], third["skipped_tokens"]
    assert (first["skipped_tokens"], other["skipped_tokens"]) == (0, 0)
    assert same_step_hit == stored_hit == len(SHARED) // 32 * 32
    for request in document["requests"]:
        expected = request["prompt_tokens"] + request["generated_tokens"] - 1
        assert request["rows_delivered"] == request["rows_equal_to_tap"] == expected
        assert request["rows_vllm_alone"] == expected - request["skipped_tokens"]
        assert request["largest_difference_to_cache_off"] <= document["bound"]
        stored = read_request_file(request["file"])
        assert stored.ranges == ((0, expected),)
        assert stored.hidden_states.shape == (expected, 128)
        assert Path(request["file"]).parent == out / "rows"
    assert sorted(path.name for path in out.iterdir()) == ["engine-off.log", "engine-on.log", "rows"]
    assert len(request_files(out / "rows")) == 4
    assert "cold wave" in done.stderr


def test_an_engine_that_cannot_start_is_reported_with_its_own_words(model, tmp_path):
    broken = tmp_path / "model"
    broken.mkdir()
    for path in model.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    described = json.loads((broken / "config.json").read_text()) | {"architectures": ["NoSuchModelForCausalLM"]}
    (broken / "config.json").write_text(json.dumps(described))
    command = [
        sys.executable,
        "-m",
        "omni_core.cli.main",
        "demo",
        "--model",
        str(broken),
        "--out",
        str(tmp_path / "out"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "the engine with prefix caching on ended with status 1" in done.stderr
    assert "NoSuchModelForCausalLM" in done.stderr
    assert done.stdout == ""
