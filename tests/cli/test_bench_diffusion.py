# SPDX-License-Identifier: Apache-2.0
"""`omni-core bench diffusion`: its settings, and the token counts of its rows; no time is looked at."""

import io
import json
from contextlib import redirect_stdout

import pytest
import torch

from omni_core.cli.bench.diffusion.config import DiffusionBenchConfig
from omni_core.cli.bench.plots import can_plot
from omni_core.cli.bench.results import BenchmarkError
from omni_core.cli.main import main

TINY = {"layout": "debug", "steps": [1, 2], "distinct_steps": [1], "requests": 2, "kv_cache_memory_bytes": 2**22}
MODES = ["dense", "paged", "paged+prefix"]
PUBLISHED = {
    "layout": "big",
    "steps": (2, 4, 8, 50),
    "requests": 8,
    "warmups": 2,
    "references": 2,
    "guidance_scale": 2.5,
    "seed": 42,
    "modes": tuple(MODES),
    "attention_owner": "kernel",
}


def bench(*arguments):
    """Exit status and what was printed."""
    threads = torch.get_num_threads()
    with redirect_stdout(io.StringIO()) as stdout:
        status = main(["bench", "diffusion", *map(str, arguments)])
    torch.set_num_threads(threads)
    return status, stdout.getvalue()


def written(tmp_path, **settings):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**TINY, **settings}))
    return path


def test_without_a_file_it_is_what_this_project_publishes():
    config = DiffusionBenchConfig()
    assert {name: getattr(config, name) for name in PUBLISHED} == PUBLISHED


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"step": [2]}, "there is no setting 'step'; there is layout, dtype"),
        ({"steps": 2}, "steps=2 is a int; a list of int is wanted"),
        ({"steps": [True]}, "a list of int is wanted"),
        ({"steps": [0]}, "every run has at least one step"),
        ({"modes": ["sparse"]}, r"modes: \['sparse'\] is none of dense, paged, paged\+prefix"),
        ({"modes": []}, "modes: nothing is none of"),
        ({"workloads": ["other"]}, "is none of shared-reference, distinct-prompts"),
        ({"attention_owner": "flash"}, "is none of kernel, gathered"),
        ({"requests": 0}, "requests=0; at least 1 is wanted"),
        ({"warmups": -1}, "warmups=-1 is negative"),
        ({"guidance_scale": "2"}, "guidance_scale='2' is a str; float is wanted"),
    ],
)
def test_a_setting_that_is_none_or_wrong_is_told(tmp_path, settings, says):
    path = written(tmp_path, **settings)
    with pytest.raises(BenchmarkError, match=f"config.json: .*{says}"):
        DiffusionBenchConfig.from_file(path)


@pytest.mark.parametrize(
    ("text", "says"), [("[]", "a JSON object is wanted"), ("{", "Expecting"), ('{"a":1,"a":1}', "twice")]
)
def test_a_file_that_is_no_configuration_ends_the_command(tmp_path, capsys, text, says):
    path = tmp_path / "config.json"
    path.write_text(text)
    assert bench("--config", path)[0] == 1
    assert says in capsys.readouterr().err


def test_a_model_that_refuses_its_settings_ends_the_command(tmp_path, capsys):
    assert bench("--config", written(tmp_path, layout="huge", modes=["dense"]))[0] == 1
    assert "dense: tiny-hunyuan: layout='huge'" in capsys.readouterr().err


def test_dense_alone_needs_no_vllm_and_has_no_ratio(tmp_path):
    status, told = bench("--config", written(tmp_path, modes=["dense"]), "--format", "json")
    document = json.loads(told)
    assert status == 0
    assert [(row["workload"], row["steps"]) for row in document["rows"]] == [
        ("shared-reference", 1),
        ("shared-reference", 2),
        ("distinct-prompts", 1),
    ]
    for row in document["rows"]:
        assert (row["mode"], row["requests"], row["first_step_tokens"]) == ("dense", 2, 220)
        assert "first_step_over_paged" not in row
        assert row["encoder_ms"] > 0
    assert {target["verdict"] for target in document["targets"]} == {"not measured"}


@pytest.mark.engine
@pytest.mark.filterwarnings("default")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("owner", ["kernel", "gathered"])
def test_token_counts_of_all_modes_and_workloads(tmp_path, owner):
    path = written(tmp_path, attention_owner=owner, block_size=16)
    status, told = bench("--config", path, "--format", "json", "--out", tmp_path / "out")
    assert status == 0
    rows = json.loads(told)["rows"]
    assert [row["mode"] for row in rows] == MODES * 3
    by_mode = {(row["workload"], row["mode"], row["steps"]): row for row in rows}
    for row in rows:
        cached = row["mode"] == "paged+prefix"
        hit = 0 if not cached else 80 if row["workload"] == "shared-reference" else 64  # of 91 tokens, pages of 16
        assert row["first_step_tokens"] == 2 * (110 - hit)
        assert row["hit_tokens"] == 2 * hit
        assert row["queried_tokens"] == (0 if row["mode"] == "dense" else 220)
        assert row["pages"] == {"dense": 0, "paged": 14}.get(row["mode"], 14)
        assert (row["hash_ms"] > 0) == cached
        assert row["first_step_over_paged_ci95"][0] <= row["first_step_over_paged"]
    assert by_mode["shared-reference", "paged", 2]["end_to_end_over_paged"] == 1.0
    page = (tmp_path / "out" / "index.md").read_text()
    assert "## diffusion" in page
    if can_plot():
        for name in ("diffusion-first-step", "diffusion-end-to-end"):
            assert (tmp_path / "out" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
            assert f"![{name}]({name}.png)" in page


@pytest.mark.engine
@pytest.mark.filterwarnings("default")
@pytest.mark.timeout(300)
def test_the_published_token_counts_are_those_of_the_big_layout(tmp_path):
    path = written(
        tmp_path,
        layout="big",
        steps=[1],
        requests=1,
        warmups=1,
        workloads=["shared-reference"],
        modes=["paged", "paged+prefix"],
        kv_cache_memory_bytes=2**27,
    )
    status, told = bench("--config", path, "--format", "json")
    assert status == 0
    verdicts = {target["name"]: (target["verdict"], target["measured"]) for target in json.loads(told)["targets"]}
    assert verdicts["first-step tokens of a full hit"] == ("met", 810)
    assert verdicts["first-step tokens without one"] == ("met", 4_074)
