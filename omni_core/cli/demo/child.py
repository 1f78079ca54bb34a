# SPDX-License-Identifier: Apache-2.0
"""Runs a part of the demo in a process of its own: its chatter goes to a log file, its progress to us."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from omni_core.cli.demo.progress import Progress

_LOG_TAIL_LINES = 15
_TERMINATE_TIMEOUT_S = 10.0


class DemoError(RuntimeError):
    """The demo cannot go on; the message says why and what to do."""


def run_child(
    module: str,
    arguments_for: Callable[[int], Sequence[str]],
    *,
    what: str,
    log: Path,
    progress: Progress,
    environment: Mapping[str, str],
) -> None:
    """Run `python -m module` until it ends, and show the progress it writes as JSON lines. Main thread only; blocks.

    The child does not outlive the call: an exception, an interrupt and SIGTERM end it too.

    Args:
        module: what to run, with this interpreter.
        arguments_for: its arguments, given the file descriptor that takes its progress.
        what: what it does, for the error.
        log: takes its standard output and standard error.
        progress: shows the lines.
        environment: the child's whole environment.

    Raises:
        DemoError: it did not end with status 0; holds the last lines of the log.
    """
    reading, writing = os.pipe()
    with os.fdopen(reading, encoding="utf-8") as pipe:
        try:
            # -P: what lies in the directory the operator happens to be in is not imported.
            command = [sys.executable, "-P", "-m", module, *arguments_for(writing)]
            with log.open("ab") as output:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=dict(environment),
                    pass_fds=(writing,),
                )
        finally:
            os.close(writing)
        # By default SIGTERM ends this process without another word, and the child would go on for minutes.
        before = signal.signal(signal.SIGTERM, _exit_as_terminated)
        try:
            for line in pipe:
                told = json.loads(line)
                progress.say(told["text"], told["done"], told["total"])
            status = process.wait()
        finally:
            signal.signal(signal.SIGTERM, before)
            _end(process)
    if status != 0:
        ended = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
        raise DemoError(f"{what} {ended}. The last lines of {log}:\n{_tail(log)}")


def _exit_as_terminated(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_TERMINATE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join("  " + line for line in lines[-_LOG_TAIL_LINES:])
