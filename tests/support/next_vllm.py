# SPDX-License-Identifier: Apache-2.0
"""The newest vLLM, of which there is no CPU build: its wheel is fetched once, read and never imported."""

import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest

NEXT_WHEEL = "vllm==0.33.0"
"""Published for CUDA only: it can be read here, not run. 336 MB."""
CACHE = Path(__file__).parents[2] / ".venv-vllm-wheels"


def modules_of_next_vllm(modules: Iterable[str], directory: Path) -> Path:
    """Put `modules` of the wheel, such as `v1/core/sched/output.py`, into `directory`; its package folder."""
    with zipfile.ZipFile(wheel_of(NEXT_WHEEL, CACHE)) as wheel:
        wheel.extractall(directory, [f"vllm/{module}" for module in set(modules)])
    return directory / "vllm"


def wheel_of(requirement: str, directory: Path) -> Path:
    """The wheel, fetched once into `directory`; the test is skipped if it cannot be."""
    name, version = requirement.split("==")
    pattern = f"{name}-{version}-*.whl"
    if not list(directory.glob(pattern)):
        fetched = subprocess.run(
            [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(directory), requirement],
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        if fetched.returncode:
            pytest.skip(f"{requirement} cannot be fetched: {fetched.stderr.strip().splitlines()[-1:]}")
    return next(directory.glob(pattern))
