# SPDX-License-Identifier: Apache-2.0
"""`omni-core plan --model`: KV heads and dtypes as vLLM reads them; a KV cache of another form is not guessed."""

import json

import pytest
from model_configs import DEEPSEEK_V2_LITE, SMOLLM2_135M, write_model

from omni_core.cli.main import main

ONE_GIB = ["--kv-cache-bytes", "1 GiB", "--host-bytes", "1024 GiB"]
# 30 layers x 2 x heads x 64 x 2 bytes x 16 tokens
BLOCKS_OF_1_HEAD = (1 << 30) // (30 * 2 * 1 * 64 * 2 * 16)
BLOCKS_OF_3_HEADS = (1 << 30) // (30 * 2 * 3 * 64 * 2 * 16)
BLOCKS_OF_9_HEADS = (1 << 30) // (30 * 2 * 9 * 64 * 2 * 16)
FALCON = {"model_type": "falcon", "multi_query": True}


def plan(capsys, folder, *arguments):
    assert main(["plan", "--model", folder, *ONE_GIB, *arguments, "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    return document["stage"], document["notes"]


def refused(capsys, folder, *arguments):
    assert main(["plan", "--model", folder, *ONE_GIB, *arguments]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("heads", "blocks"),
    [
        ({"n_head_kv": 1, "num_kv_heads": 3}, BLOCKS_OF_1_HEAD),
        ({"num_kv_heads": 1, "num_key_value_heads": 3}, BLOCKS_OF_1_HEAD),
        ({"num_key_value_heads": 3, "multi_query_group_num": 1}, BLOCKS_OF_3_HEADS),
        ({"multi_query_group_num": 1, "num_attention_groups": 3}, BLOCKS_OF_1_HEAD),
        ({"num_attention_groups": 3}, BLOCKS_OF_3_HEADS),
        ({"num_kv_heads": None, "num_key_value_heads": 3}, BLOCKS_OF_3_HEADS),
        ({}, BLOCKS_OF_9_HEADS),
        ({**FALCON, "n_head_kv": 9}, BLOCKS_OF_1_HEAD),
        ({**FALCON, "new_decoder_architecture": True, "num_kv_heads": 3}, BLOCKS_OF_3_HEADS),
    ],
)
def test_kv_heads_are_read_from_the_fields_that_vllm_reads_and_in_its_order(capsys, tmp_path, heads, blocks):
    others = {name: value for name, value in SMOLLM2_135M.items() if name != "num_key_value_heads"}
    stage, _ = plan(capsys, write_model(tmp_path, others | heads))
    assert stage["num_blocks"] == blocks


def test_a_float32_checkpoint_is_planned_in_the_dtype_that_vllm_runs_it_in(capsys, tmp_path):
    folder = write_model(tmp_path, SMOLLM2_135M | {"torch_dtype": "float32"})
    stage, notes = plan(capsys, folder)
    assert (stage["hidden_dtype"], stage["num_blocks"]) == ("bfloat16", BLOCKS_OF_3_HEADS)
    assert "vLLM's dtype=auto runs in bfloat16" in notes[0]
    assert "give --dtype float32" in notes[0]
    stage, notes = plan(capsys, folder, "--dtype", "float32")
    assert (stage["hidden_dtype"], stage["num_blocks"]) == ("float32", BLOCKS_OF_3_HEADS // 2)
    assert notes == []


def test_float16_is_not_planned_for_a_model_that_vllm_does_not_run_in_it(capsys, tmp_path):
    glm4 = SMOLLM2_135M | {"torch_dtype": "float16", "model_type": "glm4"}
    stage, notes = plan(capsys, write_model(tmp_path, glm4))
    assert stage["hidden_dtype"] == "bfloat16"
    assert notes == ["vLLM does not run glm4 in float16: bfloat16 is meant"]


STATIC_FP8 = {"type": "float", "num_bits": 8, "dynamic": False}


@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, "fp8_e4m3"),
        ({"quant_method": "modelopt_fp4", "quantization": {"kv_cache_quant_algo": "FP8"}}, "fp8_e4m3"),
        ({"producer": {"name": "modelopt"}, "quantization": {"kv_cache_quant_algo": "FP8"}}, "fp8_e4m3"),
        ({"quant_method": "modelopt", "kv_cache_scheme": STATIC_FP8}, "fp8_e4m3"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": STATIC_FP8}, "fp8"),
    ],
)
def test_the_kv_dtype_that_a_checkpoint_asks_for_is_planned_and_said(capsys, tmp_path, quantization, dtype):
    folder = write_model(tmp_path, SMOLLM2_135M | {"quantization_config": quantization})
    stage, notes = plan(capsys, folder)
    assert stage["num_blocks"] == (1 << 30) // (30 * 2 * 3 * 64 * 16)
    assert notes == [f"the checkpoint asks for a KV cache in {dtype}; another --kv-cache-dtype overrides it"]
    stage, notes = plan(capsys, folder, "--kv-cache-dtype", "bfloat16")
    assert (stage["num_blocks"], notes) == (BLOCKS_OF_3_HEADS, [])


def test_the_kv_dtype_may_stand_in_the_file_beside_the_configuration(capsys, tmp_path):
    folder = write_model(tmp_path, SMOLLM2_135M)
    beside = {"producer": {"name": "modelopt"}, "quantization": {"kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    assert "a KV cache in fp8_e4m3" in plan(capsys, folder)[1][0]


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "awq", "kv_cache_scheme": STATIC_FP8},
        {"quant_method": "modelopt", "kv_cache_quant_algo": "unheard-of"},
        {"quant_method": "modelopt", "kv_cache_scheme": {**STATIC_FP8, "dynamic": True}},
        {"quant_method": "modelopt", "kv_cache_quant_algo": [1]},
    ],
)
def test_what_vllm_does_not_follow_is_not_followed(capsys, tmp_path, quantization):
    stage, notes = plan(capsys, write_model(tmp_path, SMOLLM2_135M | {"quantization_config": quantization}))
    assert (stage["num_blocks"], notes) == (BLOCKS_OF_3_HEADS, [])


def test_a_kv_dtype_with_scales_beside_it_is_not_guessed(capsys, tmp_path):
    nvfp4 = {"quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"}}
    folder = write_model(tmp_path, SMOLLM2_135M | nvfp4)
    assert "a KV cache in nvfp4, which has scales beside it; give --num-blocks" in refused(capsys, folder)
    assert plan(capsys, folder, "--kv-cache-dtype", "fp8")[0]["num_blocks"] > BLOCKS_OF_3_HEADS


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attention_chunk_size", 8192),
        ("linear_attn_config", {"kda_layers": [1]}),
        ("attn_type_list", [0, 1]),
        ("attn_layer_indices", [9, 18]),
        ("block_types", ["recurrent", "attention"]),
        ("full_attn_idxs", [2, 5]),
        ("index_head_dim", 128),
        ("compress_ratios", [4, 128]),
        ("is_encoder_decoder", True),
        ("num_kv_shared_layers", 15),
        ("block_configs", [{"attention": {"n_heads_in_group": 8}}]),
        ("hybrid_layer_pattern", [0, 1]),
        ("mamba_d_state", 64),
    ],
)
def test_layers_that_do_not_all_have_plain_attention_are_refused(capsys, tmp_path, field, value):
    folder = write_model(tmp_path, SMOLLM2_135M | {field: value})
    error = refused(capsys, folder)
    assert f"{field} says that " in error
    assert "give --num-blocks" in error
    plan(capsys, write_model(tmp_path, SMOLLM2_135M | {field: None}))


def test_latent_attention_is_sized_for_the_model_types_that_vllm_lists(capsys, tmp_path):
    plan(capsys, write_model(tmp_path, DEEPSEEK_V2_LITE | {"model_type": "deepseek_v3"}))
    error = refused(capsys, write_model(tmp_path, DEEPSEEK_V2_LITE | {"model_type": "minicpm3"}))
    assert "model type 'minicpm3' is not one of those known to keep latent KV entries" in error
    error = refused(capsys, write_model(tmp_path, SMOLLM2_135M | {"v_head_dim": 32}))
    assert "v_head_dim says that keys and values differ in size" in error


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tensor-parallel-size", "2"], "--tensor-parallel-size 2: vLLM wants it to divide the 9 heads"),
        (["--pipeline-parallel-size", "31"], "--pipeline-parallel-size 31: there are 30 layers"),
    ],
)
def test_a_split_that_vllm_refuses_is_refused(capsys, tmp_path, arguments, said):
    assert said in refused(capsys, write_model(tmp_path, SMOLLM2_135M), *arguments)
