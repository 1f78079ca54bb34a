# SPDX-License-Identifier: Apache-2.0
"""Runs a program that starts a real vLLM, in a process of its own: importing vllm changes torch for all of one."""

import json
import os
import subprocess
import sys

TIMEOUT_S = 500


def run_engine_program(program, name, result, *, modules=(), timeout_s=TIMEOUT_S, **environment):
    """What `python PROGRAM NAME RESULT` wrote into its result, as JSON.

    Args:
        program: path of the program.
        name: what it is to run.
        result: path it writes to.
        modules: folders its processes, and vLLM's, import from.
        timeout_s: bound of the run.
        environment: further variables.
    """
    path = os.pathsep.join(filter(None, (*map(str, modules), os.environ.get("PYTHONPATH"))))
    run = subprocess.run(
        [sys.executable, str(program), name, str(result)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        # vLLM warns a lot of its own.
        env=os.environ | {"PYTHONPATH": path, "PYTHONWARNINGS": "default"} | environment,
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-6000:]
    return json.loads(result.read_text())
