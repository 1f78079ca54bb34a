# SPDX-License-Identifier: Apache-2.0
"""`omni-core diffuse`: real pictures in, pictures out, and a table of what was hit; every example deploy file runs."""

import argparse
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from omni_core.cli.diffuse.arguments import LoRAArgument, lora_argument, output_paths
from omni_core.cli.diffuse.pictures import PictureError, read_picture
from omni_core.cli.main import main
from omni_core.diffusion_kv.tiny_hunyuan import TinyHunyuanOptions, make_adapter

EXAMPLE = Path(__file__).parents[2] / "examples" / "diffusion"
PICTURES = [str(EXAMPLE / "lighthouse.png"), str(EXAMPLE / "boat.png")]


def run(capsys, *arguments, deploy="dense.yaml"):
    """Exit status, stdout, stderr."""
    status = main(["diffuse", "--deploy", str(EXAMPLE / deploy), "--prompt", "a boat", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def pixels(path):
    with Image.open(path) as picture:
        return np.array(picture)


def test_a_picture_is_written_and_the_table_says_what_was_computed(tmp_path, capsys):
    out = tmp_path / "drawn.png"
    status, told, _ = run(capsys, "--reference", *PICTURES, "--out", out, "--steps", 2)
    assert status == 0
    assert pixels(out).shape == (64, 64, 3)
    assert "tiny-hunyuan, diffusion_kv_mode dense_legacy, prefix caching off" in told
    assert "1 of 1 pictures, 2 forwards; the model keeps its own keys and values" in told
    (line,) = [line for line in told.splitlines() if line.startswith("1  ")]
    assert line.split()[1:5] == ["completed", "2", "0", "220"]


def test_several_prompts_and_repetitions_are_requests_with_pictures_of_their_own(tmp_path, capsys):
    arguments = ("--prompt", "cat", "--repeat", 2, "--out", tmp_path / "p.png", "--steps", 1, "--format", "json")
    status, told, _ = run(capsys, *arguments)
    document = json.loads(told)
    assert status == 0
    assert document["ok"] is True
    assert [(one["request_id"], one["prompt"]) for one in document["requests"]] == [
        ("1", "a boat"),
        ("2", "cat"),
        ("3", "a boat"),
        ("4", "cat"),
    ]
    drawn = [pixels(tmp_path / f"p-{number}.png").tolist() for number in (1, 2, 3, 4)]
    assert drawn[0] == drawn[2] != drawn[1] == drawn[3]


def test_seed_guidance_and_adapter_reach_the_model(tmp_path, capsys):
    adapter = tmp_path / "ink.safetensors"
    make_adapter(adapter, TinyHunyuanOptions(layout="debug").transformer, rank=2, seed=1)
    drawn = {}
    for name, options in {
        "plain": (),
        "seed": ("--seed", 7),
        "guidance": ("--guidance", 1),
        "ink": ("--lora", f"ink={adapter}"),
        "half": ("--lora", f"ink={adapter}:0.5"),
    }.items():
        out = tmp_path / f"{name}.png"
        status, told, _ = run(capsys, "--steps", 2, "--out", out, "--format", "json", *options)
        assert status == 0
        assert json.loads(told)["requests"][0]["rows"] == (1 if name == "guidance" else 2)
        drawn[name] = pixels(out).tobytes()
    assert len(set(drawn.values())) == len(drawn)


def test_a_refused_request_is_told_and_ends_with_status_1(tmp_path, capsys):
    out = tmp_path / "p.png"
    status, told, _ = run(capsys, "--prompt", "x" * 500, "--out", out, "--steps", 1)
    assert status == 1
    assert "refused: request '2': " in told
    assert [path.name for path in tmp_path.iterdir()] == ["p-1.png"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--reference", "nowhere.png"), "nowhere.png cannot be read as a picture"),
        (("--out", "no/such/folder.png"), "there is no folder"),
        (("--out", "picture.txt"), "pillow writes no .txt; use .png"),
        (("--stage", "3"), "diffusion stage 3 is wanted; there is 0"),
    ],
)
def test_what_cannot_be_used_is_told_before_a_model_is_made(capsys, monkeypatch, arguments, says):
    monkeypatch.setattr("omni_core.cli.diffuse.command.open_engine", None)
    status, told, complained = run(capsys, *arguments, "--format", "json")
    assert status == 2
    assert json.loads(told)["ok"] is False
    assert says in complained


def test_without_pillow_the_command_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    status, _, complained = run(capsys)
    assert status == 2
    assert "pip install 'omni-core[diffusion]'" in complained


def test_a_stage_that_cannot_be_opened_ends_with_status_1(capsys, tmp_path):
    deploy = tmp_path / "deploy.yaml"
    deploy.write_text("pipeline: hunyuan_image3_dit\nstages:\n  - stage_id: 0\n")
    status, _, complained = run(capsys, "--out", tmp_path / "p.png", deploy=deploy)
    assert status == 1
    assert "hunyuan-image3" in complained


@pytest.mark.parametrize(
    ("text", "argument"),
    [
        ("ink=a.safetensors", LoRAArgument("ink", Path("a.safetensors"), 1.0)),
        ("ink=a.safetensors:0.5", LoRAArgument("ink", Path("a.safetensors"), 0.5)),
        ("ink=a:b", LoRAArgument("ink", Path("a:b"), 1.0)),
        ("ink=a:-2", LoRAArgument("ink", Path("a"), -2.0)),
    ],
)
def test_an_adapter_has_a_name_a_path_and_perhaps_a_scale(text, argument):
    assert lora_argument(text) == argument


@pytest.mark.parametrize("text", ["", "ink", "ink=", "=a"])
def test_an_adapter_without_name_or_path_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="NAME=PATH"):
        lora_argument(text)


def test_one_picture_keeps_its_name_and_several_are_numbered():
    assert output_paths(Path("a/b.png"), 1) == [Path("a/b.png")]
    assert output_paths(Path("a/b.png"), 2) == [Path("a/b-1.png"), Path("a/b-2.png")]


def test_a_picture_with_transparency_stands_on_white_and_upright(tmp_path):
    clear = Image.new("RGBA", (2, 3), (255, 0, 0, 0))
    clear.save(tmp_path / "clear.png")
    assert read_picture(tmp_path / "clear.png").tolist() == np.full((3, 2, 3), 255).tolist()
    turned = Image.new("RGB", (2, 3), "red")
    exif = turned.getexif()
    exif[0x0112] = 6  # on its side
    turned.save(tmp_path / "turned.jpg", exif=exif)
    assert read_picture(tmp_path / "turned.jpg").shape == (2, 3, 3)
    (tmp_path / "text.png").write_text("no picture")
    with pytest.raises(PictureError, match=r"text\.png cannot be read"):
        read_picture(tmp_path / "text.png")


def test_the_example_pictures_are_drawn_by_their_script(tmp_path):
    subprocess.run([sys.executable, str(EXAMPLE / "draw_pictures.py"), str(tmp_path)], check=True)
    for path in map(Path, PICTURES):
        assert pixels(tmp_path / path.name).tolist() == pixels(path).tolist()


@pytest.mark.engine
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("deploy", "hits"), [("paged.yaml", [0, 0, 0]), ("paged_prefix.yaml", [0, 64, 64])])
def test_every_example_deploy_file_draws_the_dense_picture(deploy, hits, tmp_path, capsys):
    shutil.copytree(EXAMPLE, tmp_path / "example")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "omni_core.cli.main", "diffuse", "--deploy", deploy, "--prompt", "a boat"),
            *("--reference", "lighthouse.png", "boat.png", "--repeat", "3", "--steps", "4", "--format", "json"),
        ],
        cwd=tmp_path / "example",
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    document = json.loads(done.stdout)  # and nothing of vLLM's beside it
    assert [one["kv"]["cached_prefix_tokens"] for one in document["requests"]] == hits
    assert [one["first_step_tokens"] for one in document["requests"]] == [2 * (110 - hit) for hit in hits]
    assert document["stats"]["kv"]["hit_tokens"] == 2 * sum(hits)
    run(capsys, "--reference", *PICTURES, "--steps", 4, "--out", tmp_path / "dense.png")
    wanted = pixels(tmp_path / "dense.png").astype(int)
    for number in (1, 2, 3):
        drawn = pixels(tmp_path / "example" / f"image-{number}.png").astype(int)
        assert abs(drawn - wanted).max() <= 1  # rounding of the kernel's 1e-7 to a pixel
