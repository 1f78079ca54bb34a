# SPDX-License-Identifier: Apache-2.0
"""The diffusion page: its commands run, its table is what they print, its settings are the benchmark's."""

import json
import re
import shlex
from pathlib import Path

import pytest

from omni_core.cli.bench.diffusion.config import DiffusionBenchConfig
from omni_core.cli.main import main
from omni_core.diffusion_kv.deploy import load_deploy

REPOSITORY = Path(__file__).parents[2]
EXAMPLE = REPOSITORY / "examples" / "diffusion"
PAGE = (REPOSITORY / "docs" / "diffusion-kv.md").read_text(encoding="utf-8")
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")


def commands(text):
    """Every `omni-core diffuse` of a page, as arguments."""
    joined = text.replace("\\\n", " ")
    return [shlex.split(line)[1:] for line in re.findall(r"^omni-core diffuse .*$", joined, re.MULTILINE)]


def test_there_are_commands():
    assert len(commands(PAGE)) == 2
    assert len(commands(README)) == 1


def test_the_first_command_draws_without_vllm(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    assert main(commands(PAGE)[0]) == 0
    assert (tmp_path / "image.png").is_file()
    assert "1 of 1 pictures" in capsys.readouterr().out


@pytest.mark.engine
@pytest.mark.filterwarnings("default")
@pytest.mark.timeout(300)
def test_the_table_of_the_page_is_that_of_the_second_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    assert main(commands(PAGE)[1]) == 0
    shown, told = (
        re.findall(r"^(\d) +(completed +\d+ +\d+ +\d+)", text, re.MULTILINE) for text in (PAGE, capsys.readouterr().out)
    )
    assert shown == told
    assert len(shown) == 4


def test_the_example_deploy_files_are_the_three_modes():
    stages = {path.stem: load_deploy(path).stage().kv for path in EXAMPLE.glob("*.yaml")}
    assert {name: (kv.diffusion_kv_mode.value, kv.enable_prefix_caching) for name, kv in stages.items()} == {
        "dense": ("dense_legacy", False),
        "paged": ("paged_scheduler", False),
        "paged_prefix": ("paged_scheduler", True),
    }


def test_the_example_of_the_benchmark_holds_its_defaults():
    settings = json.loads((EXAMPLE / "bench.json").read_text(encoding="utf-8"))
    assert DiffusionBenchConfig.from_mapping(settings) == DiffusionBenchConfig()
