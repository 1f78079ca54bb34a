# SPDX-License-Identifier: Apache-2.0
"""An engine in a process of its own, which runs the loads it is told one by one."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from omni_core.cli.bench.results import BenchmarkError
from omni_core.integrations.vllm.bench.loads import EngineKind, Load, LoadResult

_MODULE = "omni_core.integrations.vllm.bench.serve"
ANSWER_TIMEOUT_S = 1800.0
"""Far above what a load takes, or a start: an engine that takes longer hangs."""
_END_TIMEOUT_S = 60.0
_LOG_TAIL_LINES = 15


class EngineProcessError(BenchmarkError):
    """The engine's process ended or does not answer; holds the last lines of its log."""


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

    def run(self, load: Load, timeout_s: float = ANSWER_TIMEOUT_S) -> LoadResult:
        """Run a load and wait for what it took.

        Raises:
            EngineProcessError: the process ended instead, or does not answer; it is killed then.
        """
        try:
            self._commands.write(json.dumps(load.as_document()) + "\n")
            self._commands.flush()
        except BrokenPipeError:
            raise self._failure("ended") from None
        # There is one answer per load, so nothing of it is buffered yet.
        if not select.select([self._answers], [], [], timeout_s)[0]:
            self._process.kill()
            raise self._failure(f"did not answer within {timeout_s:g} s")
        line = self._answers.readline()
        if not line:
            raise self._failure("ended")
        return LoadResult(**json.loads(line))

    def _failure(self, what: str) -> EngineProcessError:
        tail = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        return EngineProcessError(
            f"the engine '{self.kind.value}' {what}; --skip vllm leaves these engines out of all. Its log ends:\n"
            + "\n".join(f"  {line}" for line in tail)
        )

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
