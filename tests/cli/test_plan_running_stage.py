# SPDX-License-Identifier: Apache-2.0
"""`omni-core plan --server`: a stage that may outgrow its host is told what to change, by its own settings."""

import json
from dataclasses import asdict

import pytest
import torch
from vllm_server import vllm_server

from omni_core.cli.main import main
from omni_core.prefix_cache.config import PrefixCacheConfig
from omni_core.prefix_cache.sizing import StageSizes

CONFIG = PrefixCacheConfig(
    num_blocks=100, block_size=32, hidden_size=64, hidden_dtype=torch.float32, max_num_tokens=256
)
METRICS = 'vllm:cache_config_info{block_size="32",engine="0",num_gpu_blocks="100"} 1.0\n'
ROWS_BYTES = 100 * 32 * 256
LAYER = "hidden_states.layer_3"
GEOMETRY = {
    "num_blocks": CONFIG.num_blocks,
    "block_size": CONFIG.block_size,
    "hidden_size": CONFIG.hidden_size,
    "hidden_dtype": "float32",
    "max_num_tokens": CONFIG.max_num_tokens,
    "caches_per_host": 1,
}


def running(**settings):
    """A stage that keeps hidden rows and one layer's."""
    told = {"layers": [3], "sink_queue_bytes": 12_345, "sink_options": {"max_bytes": 1 << 30}} | settings
    memory = StageSizes(CONFIG, {"codes": 48}, layer_keys=(LAYER,)).plan().cache
    return {
        "gate": {"status": "supported", "reason": "it is one"},
        "backend": "cpu_sim",
        "cache": {"memory": asdict(memory)},
        "settings": {name: {"value": value, "origin": "flag", "place": "a flag"} for name, value in told.items()},
        "geometry": GEOMETRY,
    }


def plan(capsys, stage, *arguments):
    with vllm_server(METRICS, [stage]) as url:
        status = main(["plan", "--server", url, *arguments, "--caches-per-host", "1", "--format", "json"])
        document = json.loads(capsys.readouterr().out)
        main(["plan", "--server", url, *arguments, "--caches-per-host", "1"])
    return status, document, capsys.readouterr().out


def test_every_setting_that_makes_it_fit_is_named_and_makes_it_fit(capsys):
    most_bytes = plan(capsys, running(), "--host-bytes", "64 GiB")[1]["most_bytes"]
    status, document, text = plan(capsys, running(), "--host-bytes", str(most_bytes - 1000))
    assert status == 1
    ways = {way["setting"]: way["value"] for way in document["remedies"]}
    assert {"num_blocks", "staging_depth", "layers", "sink_bytes", "max_recycled_bytes"} <= ways.keys()
    assert ways["sink_bytes"] == (1 << 30) - 1000
    assert ways["num_blocks"] == 99
    assert "Each of these alone makes it fit:\n" in text
    smaller = running(sink_options={"max_bytes": ways["sink_bytes"]})
    assert plan(capsys, smaller, "--host-bytes", str(most_bytes - 1000))[0] == 0


def test_where_no_setting_is_enough_it_says_so(capsys):
    status, document, text = plan(capsys, running(), "--host-bytes", "1 MiB")
    assert (status, document["remedies"]) == (1, [])
    assert "No single setting makes it fit: " in text


def test_a_stage_that_does_not_tell_its_sizes_is_asked_about_otherwise(capsys):
    stage = {name: part for name, part in running().items() if name != "geometry"}
    status, document, text = plan(capsys, stage, "--host-bytes", "1 MiB")
    assert (status, document["remedies"]) == (1, [])
    assert "describe it without --server" in text


def test_rows_that_were_committed_at_start_are_told_as_such(capsys):
    _, later, _ = plan(capsys, running(), "--host-bytes", "64 GiB")
    _, early, text = plan(capsys, running(pretouch=True), "--host-bytes", "64 GiB")
    assert (later["pretouched_keys"], early["pretouched_keys"]) == ([], ["__hidden_states__", LAYER])
    assert early["start_bytes"] - later["start_bytes"] == 2 * ROWS_BYTES
    rows = {line.split("  ")[0]: line for line in text.splitlines() if line.startswith("rows of")}
    assert "at start" in rows[f"rows of {LAYER}"]
    assert "as blocks are written" in rows["rows of codes"]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"settings": {"staging_depth": {"value": "many"}}}, "the running stage's staging_depth: 'many' must be "),
        ({"settings": {"sink_queue_bytes": {"value": "x"}}}, "the running stage's sink_queue_bytes: 'x' must be "),
        ({"geometry": GEOMETRY | {"hidden_dtype": "float23"}}, "hidden_dtype is 'float23'"),
        ({"geometry": GEOMETRY | {"num_blocks": "100"}}, "geometry: num_blocks='100'"),
    ],
)
def test_what_cannot_be_understood_is_wrong_usage(capsys, changed, said):
    with vllm_server(METRICS, [running() | changed]) as url:
        assert main(["plan", "--server", url, "--host-bytes", "1 MiB"]) == 2
    assert said in capsys.readouterr().err
