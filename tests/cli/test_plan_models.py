# SPDX-License-Identifier: Apache-2.0
"""`omni-core plan --model`: a model's own configuration gives the stage's rows, and the blocks that vLLM would make."""

import json

import pytest
from model_configs import (
    DEEPSEEK_V2_LITE,
    QWEN3_OMNI_30B_A3B,
    SMOLLM2_135M,
    TALKER,
    THINKER,
    write_model,
)

from omni_core.cli.main import main

ROOMY = ["--host-bytes", "1024 GiB"]


def plan(capsys, folder, *arguments):
    assert main(["plan", "--model", folder, *ROOMY, *arguments, "--format", "json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys, folder, *arguments):
    assert main(["plan", "--model", folder, *ROOMY, *arguments]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "arguments", "kv_cache", "expected"),
    [
        # 48 layers x 2 x 4 heads x 128 x 2 bytes = 98,304 bytes a token
        (QWEN3_OMNI_30B_A3B, ["--stage-config", THINKER], "24 GiB", (16_384, 2048, "bfloat16")),
        # two of the four heads per rank
        (
            QWEN3_OMNI_30B_A3B,
            ["--stage-config", THINKER, "--tensor-parallel-size", "2"],
            "24 GiB",
            (32_768, 2048, "bfloat16"),
        ),
        # more ranks than heads: one head each
        (
            QWEN3_OMNI_30B_A3B,
            ["--stage-config", THINKER, "--tensor-parallel-size", "8"],
            "24 GiB",
            (65_536, 2048, "bfloat16"),
        ),
        # the rank with most layers decides: 24 of 48
        (
            QWEN3_OMNI_30B_A3B,
            ["--stage-config", THINKER, "--pipeline-parallel-size", "2"],
            "24 GiB",
            (32_768, 2048, "bfloat16"),
        ),
        (
            QWEN3_OMNI_30B_A3B,
            ["--stage-config", THINKER, "--kv-cache-dtype", "fp8"],
            "24 GiB",
            (32_768, 2048, "bfloat16"),
        ),
        # 20 x 2 x 2 x 128 x 2 = 20,480
        (QWEN3_OMNI_30B_A3B, ["--stage-config", TALKER], "4 GiB", (13_107, 1024, "bfloat16")),
        # 30 x 2 x 3 x 64 x 2 = 23,040
        (SMOLLM2_135M, [], "1 GiB", (2_912, 576, "bfloat16")),
        (SMOLLM2_135M, ["--block-size", "32"], "1 GiB", (1_456, 576, "bfloat16")),
        (SMOLLM2_135M, ["--dtype", "float32"], "1 GiB", (1_456, 576, "float32")),
        (SMOLLM2_135M | {"torch_dtype": None}, ["--dtype", "float16"], "1 GiB", (2_912, 576, "float16")),
        # latent attention: 27 x (512 + 64) x 2 = 31,104, whatever the ranks
        (DEEPSEEK_V2_LITE, [], "8 GiB", (17_260, 2048, "bfloat16")),
        (DEEPSEEK_V2_LITE, ["--tensor-parallel-size", "4"], "8 GiB", (17_260, 2048, "bfloat16")),
    ],
)
def test_blocks_and_rows_follow_from_the_models_configuration(capsys, tmp_path, config, arguments, kv_cache, expected):
    document = plan(capsys, write_model(tmp_path, config), "--kv-cache-bytes", kv_cache, *arguments)
    stage = document["stage"]
    assert (stage["num_blocks"], stage["hidden_size"], stage["hidden_dtype"]) == expected


def test_the_file_itself_may_be_named_and_arguments_win_over_it(capsys, tmp_path):
    folder = write_model(tmp_path, SMOLLM2_135M)
    document = plan(capsys, f"{folder}/config.json", "--num-blocks", "77", "--dtype", "float32")
    assert (document["stage"]["num_blocks"], document["stage"]["hidden_dtype"]) == (77, "float32")
    assert f"{folder}/config.json" in document["sources"]


def test_several_stages_are_named_and_encoders_are_not_among_them(capsys, tmp_path):
    error = refused(capsys, write_model(tmp_path, QWEN3_OMNI_30B_A3B), "--num-blocks", "10")
    assert error.rstrip().endswith(
        "choose one with --stage-config: talker_config.code_predictor_config, talker_config.text_config, "
        "thinker_config.text_config"
    )
    error = refused(capsys, str(tmp_path), "--num-blocks", "10", "--stage-config", "talker_config")
    assert "--stage-config talker_config: " in error
    assert TALKER in error


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layers are also of sliding_attention"),
        ({"sliding_window": 4096}, "it has a sliding window"),
        ({"full_attention_interval": 4}, "full_attention_interval says that not all layers are attention"),
    ],
)
def test_a_kv_cache_that_cannot_be_sized_from_the_configuration_is_not_guessed(capsys, tmp_path, change, said):
    folder = write_model(tmp_path, SMOLLM2_135M | change)
    error = refused(capsys, folder, "--kv-cache-bytes", "1 GiB")
    assert said in error
    assert "give --num-blocks" in error
    plan(capsys, folder, "--num-blocks", "10")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("not JSON", "Expecting value"),
        ("[]", "is no configuration, but a list"),
        (json.dumps({"architectures": ["X"]}), "has no stage with hidden_size, num_hidden_layers, num_attention_heads"),
        (json.dumps(SMOLLM2_135M | {"torch_dtype": None}), "dtype is None; give --dtype"),
    ],
)
def test_a_configuration_that_does_not_help_says_why(capsys, tmp_path, config, said):
    (tmp_path / "config.json").write_text(config)
    assert said in refused(capsys, str(tmp_path), "--num-blocks", "10")


def test_a_kv_cache_smaller_than_a_block_is_refused(capsys, tmp_path):
    error = refused(capsys, write_model(tmp_path, SMOLLM2_135M), "--kv-cache-bytes", "1000")
    assert "one block takes 368640 bytes" in error
