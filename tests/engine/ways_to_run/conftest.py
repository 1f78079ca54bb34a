# SPDX-License-Identifier: Apache-2.0
"""Runs each way once, in a process of its own, and gives the tests what it saw."""

from pathlib import Path

import pytest
from engine_program import run_engine_program

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def run_way(tmp_path_factory):
    """`run_way(name, script=...)`: what the script wrote for this way."""
    seen = {}

    def run_once(name, script="run_way.py"):
        if name not in seen:
            result = tmp_path_factory.mktemp(name) / "seen.json"
            # The other processes of this vLLM must find the checking worker.
            seen[name] = run_engine_program(
                HERE / script, name, result, modules=(HERE.parent, HERE), OMP_NUM_THREADS="1"
            )
        return seen[name]

    return run_once
