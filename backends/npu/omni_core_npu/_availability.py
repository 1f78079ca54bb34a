# SPDX-License-Identifier: Apache-2.0
"""Why a machine cannot run an Ascend NPU, found without letting a broken torch_npu into this process.

Importing torch_npu where CANN is missing or does not match leaves half-loaded modules and a changed environment behind,
raises errors of any type, and may end the process. So it is tried in a child process, unless this process already has
it loaded.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from types import ModuleType
from typing import IO, Any

import torch

PROBE_TIMEOUT_S = 120.0
"""How long the child process may take to import torch and torch_npu and to count devices."""

_KILL_TIMEOUT_S = 10.0
_ANSWER_MARK = "omni-core-npu-probe:"
_PROBE = f"""
import importlib, json, sys
sys.path[:] = json.loads(sys.argv[2])
try:
    npu = importlib.import_module(sys.argv[1]).npu
    answer = {{"devices": npu.device_count() if npu.is_available() else 0}}
except BaseException as error:
    answer = {{"error": f"{{type(error).__name__}}: {{error}}"}}
print("{_ANSWER_MARK}" + json.dumps(answer), flush=True)
"""


def reason_for(package: str, *, probe_timeout_s: float = PROBE_TIMEOUT_S) -> str | None:
    """Why this process cannot run NPUs through `package`, or `None` if it can. Never raises.

    Starts a child process, for at most `probe_timeout_s`, if the package is installed and not yet loaded.

    Args:
        package: the vendor's import name, `torch_npu`.
        probe_timeout_s: seconds the child process is given.
    """
    loaded = sys.modules.get(package)
    if loaded is not None:
        return _reason_of_loaded(loaded, package)
    try:
        installed = find_spec(package) is not None
    except Exception as error:
        return f"{package} cannot be looked up: {type(error).__name__}: {error}"
    if not installed:
        return (
            f"the package {package} is not installed; install CANN and the torch-npu release made for "
            f"torch {torch.__version__}"
        )
    return _reason_of_child(package, probe_timeout_s)


def _reason_of_loaded(module: ModuleType, package: str) -> str | None:
    try:
        devices = module.npu.device_count() if module.npu.is_available() else 0
    except Exception as error:
        return f"{package} is loaded but cannot count devices: {type(error).__name__}: {error}"
    return _reason_of_count(devices, package)


def _reason_of_child(package: str, timeout_s: float) -> str | None:
    try:
        with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
            returncode = _run_probe(package, timeout_s, stdout, stderr)
            stdout.seek(0)
            stderr.seek(0)
            answer = _answer(stdout.read().decode(errors="replace"))
            said = stderr.read().decode(errors="replace").strip().splitlines()[-1:] or ["nothing was printed"]
    except Exception as error:
        return f"no child process could try {package}: {type(error).__name__}: {error}"
    if answer is not None and "devices" in answer:
        return _reason_of_count(answer["devices"], package)
    if answer is not None:
        return f"{package} is installed but cannot be imported: {answer['error']}; is CANN's set_env.sh sourced?"
    if returncode is None:
        return f"importing {package} did not end within {timeout_s:g} s in a child process"
    ended = f"was killed by signal {-returncode}" if returncode < 0 else f"ended with status {returncode}"
    return f"importing {package} broke a child process, which {ended}: {said[0]}"


def _run_probe(package: str, timeout_s: float, stdout: IO[bytes], stderr: IO[bytes]) -> int | None:
    """Run the probe; its exit status, or `None` if it was ended because `timeout_s` passed."""
    # Files, not pipes: a process that torch_npu leaves behind would hold a pipe open and us with it. Autoload is off
    # because with it the child's `import torch` would import torch_npu itself, and fail as a whole without CANN.
    child = subprocess.Popen(
        [sys.executable, "-c", _PROBE, package, json.dumps(sys.path)],
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
    )
    try:
        return child.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait(_KILL_TIMEOUT_S)


def _answer(stdout: str) -> dict[str, Any] | None:
    for line in reversed(stdout.splitlines()):
        if line.startswith(_ANSWER_MARK):
            answer: dict[str, Any] = json.loads(line.removeprefix(_ANSWER_MARK))
            return answer
    return None


def _reason_of_count(devices: int, package: str) -> str | None:
    if devices > 0:
        return None
    return f"{package} sees no NPU; see `npu-smi info` and ASCEND_RT_VISIBLE_DEVICES"
