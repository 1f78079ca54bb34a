# SPDX-License-Identifier: Apache-2.0
"""`omni-core plan --model`: whatever lies at the path and whatever stands in it, one line says what is wrong."""

import json
import os

import pytest
from model_configs import SMOLLM2_135M, write_model

from omni_core.cli.main import main

COUNTS = ["hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "kv_lora_rank"]


def refused(capsys, path):
    arguments = ["--kv-cache-bytes", "1 GiB", "--host-bytes", "1024 GiB"]
    assert main(["plan", "--model", str(path), *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("omni-core plan: ")
    assert said.err.count("\n") == 1, "one line"
    return said.err


@pytest.mark.parametrize("field", COUNTS)
@pytest.mark.parametrize("value", [-8, True, "8", 8.5, 1 << 63])
def test_a_field_that_is_no_count_is_named_with_its_value(capsys, tmp_path, field, value):
    error = refused(capsys, write_model(tmp_path, SMOLLM2_135M | {field: value}))
    assert f"{field} is {value!r}; it must be a whole number of at least 1, below 2**63" in error


@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"])
def test_nothing_of_what_must_be_there_is_refused(capsys, tmp_path, field):
    assert f"{field} is 0; it must be" in refused(capsys, write_model(tmp_path, SMOLLM2_135M | {field: 0}))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"num_key_value_heads": [3] * 30},
            "num_key_value_heads is [3, 3, 3, 3, 3, 3, ...]; it must be a whole number",
        ),
        ({"hidden_size": [576]}, "has no stage with hidden_size"),
        ({"hidden_size": 8}, "hidden_size is 8; it must be at least num_attention_heads, which is 9"),
        ({"layer_types": 5}, "layer_types is 5; it must be a list of texts"),
        ({"layer_types": "full_attention"}, "layer_types is 'full_attention'; it must be a list of texts"),
        ({"layer_types": [{"a": 1}]}, "layer_types is [{'a': 1}]; it must be a list of texts"),
        ({"layer_types": [None, "sliding_attention"]}, "it must be a list of texts"),
        ({"model_type": ["llama"]}, "model_type is ['llama']; it must be a text"),
        ({"torch_dtype": "int8"}, "dtype is 'int8'; give --dtype"),
        ({"torch_dtype": {"a": 1}}, "dtype is {'a': 1}; give --dtype"),
        ({"torch_dtype": "Tensor"}, "dtype is 'Tensor'; give --dtype"),
        ({"quantization_config": "fp8"}, "quantization_config is 'fp8'; it must be an object"),
    ],
)
def test_a_field_of_another_kind_is_named_with_its_value(capsys, tmp_path, change, said):
    assert said in refused(capsys, write_model(tmp_path, SMOLLM2_135M | change))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 100_000, "it is nested too deeply"),
        ('{"a":' * 100_000, "it is nested too deeply"),
        ('{"a":' * 900 + "1" + "}" * 900, "has no stage with"),
        ('{"hidden_size": 64, "hidden_size": 128}', "'hidden_size' is given twice in one object"),
        ('{"hidden_size": ' + "9" * 5000 + "}", "Exceeds the limit"),
        ("\ufeff{}", "Unexpected UTF-8 BOM"),
        (json.dumps({"a.b": SMOLLM2_135M, "a": {"b": SMOLLM2_135M}}), "two stages are both called a.b"),
    ],
)
def test_json_that_is_no_configuration_is_told(capsys, tmp_path, text, said):
    (tmp_path / "config.json").write_text(text)
    assert said in refused(capsys, tmp_path)


def test_a_pipe_is_not_waited_for(capsys, tmp_path):
    os.mkfifo(tmp_path / "config.json")
    assert "is not a plain file; give a model's folder" in refused(capsys, tmp_path)


def test_a_folder_in_the_files_place_and_a_device_are_refused(capsys, tmp_path):
    (tmp_path / "config.json").mkdir()
    assert "--model" in refused(capsys, tmp_path)
    assert "is not a plain file" in refused(capsys, "/dev/zero")


def test_a_huge_file_is_not_read(capsys, tmp_path):
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(1 << 40)
    assert "has more than 16,777,216 bytes" in refused(capsys, tmp_path)


@pytest.mark.parametrize("path", ["a\0b", "x" * 5000])
def test_a_name_that_no_file_can_have_is_refused(capsys, path):
    assert "--model" in refused(capsys, path)
