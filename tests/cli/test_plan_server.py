# SPDX-License-Identifier: Apache-2.0
"""`omni-core plan --server`: the blocks of any vLLM server, and what a running stage has really allocated."""

import json
from dataclasses import asdict

import pytest
import torch
from vllm_server import vllm_server

from omni_core.cli.main import main
from omni_core.prefix_cache.config import HIDDEN_KEY, PrefixCacheConfig
from omni_core.prefix_cache.sizing import plan_cache

METRICS = """\
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="32",cache_dtype="auto",engine="0",num_gpu_blocks="100",odd="a \\"b, c=\\"d"} 1.0
vllm:cache_config_info{block_size="32",cache_dtype="auto",engine="1",num_gpu_blocks="98",odd="None"} 1.0
vllm:num_requests_running{engine="0",model_name="tiny"} 0.0
"""
CONFIG = PrefixCacheConfig(
    num_blocks=100, block_size=32, hidden_size=64, hidden_dtype=torch.float32, max_num_tokens=256
)
MEMORY = plan_cache(CONFIG, {HIDDEN_KEY: 256, "codes": 48})
STAGE = {
    "gate": {"status": "supported", "reason": "it is one"},
    "backend": "cpu_sim",
    "cache": {"steps_saved": 3, "memory": asdict(MEMORY)},
    "settings": {"sink_queue_bytes": {"value": 12_345, "origin": "flag", "place": "omni_core.sink_queue_bytes"}},
}
OFF = {"gate": {"status": "ignored", "reason": "not the output rank"}}
STAGE_FLAGS = ["--hidden-size", "64", "--dtype", "float32", "--host-bytes", "64 GiB"]


def plan(capsys, url, *arguments):
    status = main(["plan", "--server", url, *arguments, "--format", "json"])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("rpc", "said"),
    [
        (404, "VLLM_SERVER_DEV_MODE=1"),
        (500, "they are not Omni Core's"),
        ([OFF], "no worker has a cache: not the output rank"),
        ([None], "no worker has a cache: none answered"),
    ],
)
def test_any_vllm_server_tells_its_blocks_and_what_is_missing_is_said(capsys, rpc, said):
    with vllm_server(METRICS, rpc) as url:
        status, document = plan(capsys, url, *STAGE_FLAGS)
    assert status == 0
    assert document["live"] is False
    stage = document["stage"]
    assert (stage["block_size"], stage["num_blocks"]) == (32, 98), "the engine with the fewest blocks"
    assert document["sources"] == [f"{url}, 2 engines"]
    assert said in document["notes"][-1]


def test_a_running_stage_tells_exactly_what_it_has_allocated(capsys):
    with vllm_server(METRICS, [OFF, STAGE]) as url:
        status, document = plan(capsys, url, "--host-bytes", "64 GiB")
        _, text = main(["plan", "--server", url, "--host-bytes", "64 GiB"]), capsys.readouterr().out
    assert (status, document["live"]) == (0, True)
    assert document["cache"] == asdict(MEMORY)
    assert document["sink_queue_bytes"] == 12_345
    assert document["device_is_host"] is True
    assert document["stage"] is None
    assert "One cache, as it runs now:" in text
    assert f"{MEMORY.pool_bytes['codes']:,}" in text


def test_a_running_stage_that_may_outgrow_its_host_is_status_1(capsys):
    with vllm_server(METRICS, [STAGE]) as url:
        status, document = plan(capsys, url, "--host-bytes", "100 MiB")
    assert status == 1
    assert "can come to" in document["problems"][0]


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ("up 1\n", "it is not a vLLM server, or runs with --disable-log-stats"),
        ('vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0\n', "with num_gpu_blocks"),
    ],
)
def test_a_server_that_tells_no_blocks_is_wrong_usage(capsys, metrics, said):
    with vllm_server(metrics) as url:
        assert main(["plan", "--server", url, *STAGE_FLAGS]) == 2
    assert said in capsys.readouterr().err


def test_a_server_that_is_not_there_is_wrong_usage(capsys):
    assert main(["plan", "--server", "http://127.0.0.1:9", *STAGE_FLAGS]) == 2
    assert "--server http://127.0.0.1:9: /metrics: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "url",
    [
        *("nonsense", "", "http://", "ftp://host", "file:///etc", "http://[::1", "http://h:99999", "http://h:abc"),
        *("http://me:secret@h", "http://h/?a=b", "http://h/#a"),
    ],
)
def test_what_is_no_address_of_a_server_is_told(capsys, url):
    assert main(["plan", "--server", url, *STAGE_FLAGS]) == 2
    assert "must be http://HOST:PORT or https://HOST:PORT" in capsys.readouterr().err


def test_engines_that_were_not_heard_are_counted_and_said(capsys):
    with vllm_server(METRICS, [OFF, STAGE]) as url:
        _, live = plan(capsys, url, "--host-bytes", "64 GiB")
        _, told = plan(capsys, url, "--host-bytes", "64 GiB", "--caches-per-host", "1")
    assert live["caches_per_host"] == 2
    assert "the server has 2 engines, and one answered, with 1 cache" in live["notes"][1]
    assert "give --caches-per-host" in live["notes"][1]
    assert (told["caches_per_host"], len(told["notes"])) == (1, 1)
    with vllm_server(METRICS) as url:
        _, planned = plan(capsys, url, *STAGE_FLAGS)
    assert planned["caches_per_host"] == 2
    assert "and none told its caches" in planned["notes"][0]


def test_the_largest_of_several_caches_is_shown(capsys):
    small = {**STAGE, "cache": {"memory": {**asdict(MEMORY), "pool_bytes": {HIDDEN_KEY: 1}}}}
    with vllm_server(METRICS, [small, STAGE]) as url:
        _, document = plan(capsys, url, "--host-bytes", "64 GiB")
    assert document["cache"] == asdict(MEMORY)
    assert document["caches_per_host"] == 4


def test_arguments_that_a_running_stage_stands_in_for_are_named(capsys):
    with vllm_server(METRICS, [STAGE]) as url:
        _, document = plan(capsys, url, *STAGE_FLAGS, "--key", "codes:1:int64", "--staging-depth", "3")
    said = document["notes"][-1]
    assert said.startswith("not used, because the running stage tells its own figures: ")
    assert said.endswith("--hidden-size, --dtype, --key, --staging-depth")
