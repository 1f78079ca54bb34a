# SPDX-License-Identifier: Apache-2.0
"""An engine in a process of its own, which runs the loads it is told one by one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from omni_core.integrations.vllm.bench.loads import EngineKind, Load, LoadResult

_MODULE = "omni_core.integrations.vllm.bench.serve"
_END_TIMEOUT_S = 60.0
_LOG_TAIL_LINES = 15


class EngineProcessError(RuntimeError):
    """The engine's process ended; holds the last lines of its log."""


class EngineProcess:
    """Use it as a context manager: the process does not outlive it."""

    def __init__(self, kind: EngineKind, model: Path, dtype: str, folder: Path, environment: Mapping[str, str]) -> None:
        """Start it; the engine is ready when the first load is answered.

        Args:
            kind: how the engine is built.
            model: directory of the model.
            dtype: what it computes in.
            folder: its log and its rows go there.
            environment: the process's whole environment.
        """
        self.kind = kind
        rows = folder / f"rows-{kind.name.lower()}"
        self._log = folder / f"engine-{kind.name.lower()}.log"
        job = {"kind": kind.value, "model": str(model), "dtype": dtype, "rows_directory": str(rows)}
        commands, told = os.pipe()
        answered, answers = os.pipe()
        self._commands = os.fdopen(told, "w", encoding="utf-8")
        self._answers = os.fdopen(answered, encoding="utf-8")
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", _MODULE, json.dumps(job), str(commands), str(answers)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                pass_fds=(commands, answers),
            )
        os.close(commands)
        os.close(answers)

    def run(self, load: Load) -> LoadResult:
        """Run a load and wait for what it took.

        Raises:
            EngineProcessError: the process ended instead.
        """
        try:
            self._commands.write(json.dumps(load.as_document()) + "\n")
            self._commands.flush()
            line = self._answers.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            tail = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_TAIL_LINES:]
            raise EngineProcessError(f"the engine '{self.kind.value}' ended:\n" + "\n".join(tail))
        return LoadResult(**json.loads(line))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(BrokenPipeError):
            self._commands.close()
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()
