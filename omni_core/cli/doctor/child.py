# SPDX-License-Identifier: Apache-2.0
"""Runs the examination of one backend in a process of its own: whatever it does there, this command goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from omni_core.cli.doctor.examination import Examination

TIME_LIMIT = "--limit-s"
"""The option a time-out names."""

_KILL_TIMEOUT_S = 10.0


def examine_apart(name: str, limit_s: float) -> Examination:
    """Examine the backend `name`. Blocks for `limit_s` at most, and ends the process and its children then.

    Returns:
        What was found until the process ended, in whatever way; `error` says so if it was not its own.
    """
    with tempfile.TemporaryDirectory(prefix="omni-core-doctor-") as folder:
        notes, output = Path(folder, "notes"), Path(folder, "output")
        notes.touch()
        # A file, not a pipe: what the process leaves behind would hold a pipe open, and us with it.
        with output.open("wb") as said:
            command = [sys.executable, "-m", "omni_core.cli.doctor.examine", name, str(notes)]
            status = _run(command, limit_s, said.fileno())
        examination = Examination()
        for line in notes.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.endswith("\n"):
                examination = examination.with_facts(json.loads(line))
        if examination.finished:
            return examination
        return replace(examination, error=_how_it_ended(status, limit_s, output))


def _run(command: list[str], limit_s: float, output: int) -> int | None:
    """Run it; its exit status, or `None` if it was ended because `limit_s` passed."""
    child = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        return child.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait(_KILL_TIMEOUT_S)


def _how_it_ended(status: int | None, limit_s: float, output: Path) -> str:
    if status is None:
        return f"it did not end within {TIME_LIMIT} {limit_s:g}"
    ended = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
    said = output.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
    return f"its process {ended}" + (f": {said[0]}" if said else "")
