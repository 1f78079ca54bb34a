# SPDX-License-Identifier: Apache-2.0
"""The layers example runs on a tiny model, and its reader gives whole examples with tokens, positions and layers."""

import os
import re
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import pytest
import torch

from omni_core.sinks.base import RequestEnd, SinkDelivery, SinkRequestEnd
from omni_core.sinks.safetensors_files import SafetensorsSink

REPOSITORY = Path(__file__).parents[2]
EXAMPLE = REPOSITORY / "examples" / "layers_for_training"
MODEL = "path/to/a/model"
LINE = re.compile(r"request \S+: (\d+) tokens, layers \{0: \((\d+), 128\), 2: \((\d+), 128\)\}")


@pytest.fixture
def reader():
    spec = spec_from_file_location("training_rows", EXAMPLE / "training_rows.py")
    module = module_from_spec(spec)
    sys.modules["training_rows"] = module  # dataclasses look their module up there
    yield spec.loader.exec_module(module) or module
    del sys.modules["training_rows"]


def write_requests(directory, requests):
    """Each request: its end, the positions it was promised and missed, and per key its rows from position 0."""
    sink = SafetensorsSink(directory)
    for req_id, (end, missing, rows) in requests.items():
        stop = len(next(iter(rows.values())))
        sink.accept(SinkDelivery(req_id, None, 1, ((0, stop),), rows, np.arange(40, 40 + stop)))
        sink.finish(SinkRequestEnd(req_id, None, end, missing))
    sink.close()


def test_the_reader_gives_tokens_positions_and_layers_of_whole_requests_and_names_the_others(reader, tmp_path):
    first = torch.arange(6.0).view(3, 2)
    rows = {"hidden_states.layer_0": first, "hidden_states.layer_2": first + 1}
    write_requests(
        tmp_path,
        {"whole": (RequestEnd.FINISHED, (), rows), "cut": (RequestEnd.FINISHED, ((3, 4),), rows)},
    )
    incomplete = []
    (example,) = reader.training_examples(tmp_path, [2, 0], incomplete)
    assert incomplete == ["cut"]
    assert example.req_id == "whole"
    assert example.token_ids.tolist() == [40, 41, 42]
    assert example.positions.tolist() == [0, 1, 2]
    assert torch.equal(example.layers[0], first)
    assert torch.equal(example.layers[2], first + 1)


def test_the_reader_leaves_out_and_names_a_request_one_of_whose_layers_misses_a_row(reader, tmp_path):
    sink = SafetensorsSink(tmp_path)
    row = torch.ones(1, 2)
    sink.accept(SinkDelivery("a", None, 1, ((0, 1),), {"hidden_states.layer_0": row}, np.array([5])))
    both = {"hidden_states.layer_0": row, "hidden_states.layer_1": row}
    sink.accept(SinkDelivery("a", None, 2, ((1, 2),), both, np.array([6])))
    sink.finish(SinkRequestEnd("a", None, RequestEnd.FINISHED))
    sink.close()
    incomplete = []
    assert list(reader.training_examples(tmp_path, [0, 1], incomplete)) == []
    assert incomplete == ["a"]
    incomplete = []
    assert len(list(reader.training_examples(tmp_path, [0], incomplete))) == 1
    assert incomplete == []


def test_the_reader_names_a_layer_that_was_not_captured(reader, tmp_path):
    rows = {"hidden_states.layer_0": torch.ones(1, 2)}
    write_requests(tmp_path, {"a": (RequestEnd.FINISHED, (), rows)})
    with pytest.raises(KeyError, match=r"hidden_states\.layer_3"):
        list(reader.training_examples(tmp_path, [3], []))


@pytest.mark.engine
@pytest.mark.timeout(400)
def test_the_example_captures_every_row_of_every_prompt(tmp_path):
    arguments = ["--model", MODEL, "--layers", "0", "2", "--rows", "rows", "--max-tokens", "3"]
    settings = {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(EXAMPLE), os.environ.get("PYTHONPATH", "")]),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    run = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("engine_example.py")), str(EXAMPLE / "capture.py"), *arguments],
        cwd=tmp_path,
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-6000:]
    told = run.stdout.splitlines()
    lines = [LINE.fullmatch(line) for line in told if line.startswith("request ")]
    assert len(lines) == 4, told
    assert all(lines), told
    for tokens, *rows in (map(int, line.groups()) for line in lines):
        assert rows == [tokens, tokens]
        assert tokens > 150
    (skipped,) = (int(line.split()[2]) for line in told if line.startswith("vLLM skipped "))
    assert skipped >= 3 * 128, "three of four prompts hit the text they share"
    assert "4 of 4 requests are whole; those that miss rows: none" in told
