# SPDX-License-Identifier: Apache-2.0
"""Runs each way once, in a process of its own, and gives the tests what it saw."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ENGINE_TESTS = HERE.parent
TIMEOUT_S = 500


def environment():
    """The environment for a vLLM whose other processes must find the checking worker."""
    path = os.pathsep.join(filter(None, (str(ENGINE_TESTS), str(HERE), os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": path, "PYTHONWARNINGS": "default", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def run_way(tmp_path_factory):
    """`run_way(name, script=...)`: what the script wrote for this way."""
    seen = {}

    def run_once(name, script="run_way.py"):
        if name not in seen:
            seen[name] = _run(script, name, tmp_path_factory.mktemp(name) / "seen.json")
        return seen[name]

    return run_once


def _run(script, name, result):
    run = subprocess.run(
        [sys.executable, str(HERE / script), name, str(result)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env=environment(),
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-6000:]
    return json.loads(result.read_text())
