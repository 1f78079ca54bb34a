# SPDX-License-Identifier: Apache-2.0
"""Shows on standard error what the demo is doing: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import importlib.util
import sys
import time
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self, TextIO


class Progress(ABC):
    """A sequence of things done one after the other. One thread; use it as a context manager."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abandon()

    @abstractmethod
    def say(self, text: str, done: int = 0, total: int = 0) -> None:
        """`done` of `total` steps of what `text` says. Another text than before ends what went before."""

    @abstractmethod
    def close(self) -> None:
        """The last thing is done. Idempotent."""

    @abstractmethod
    def abandon(self) -> None:
        """The last thing will not be done. Idempotent."""


class PlainProgress(Progress):
    """One line per thing, with the seconds since the start in front."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._began_s = time.perf_counter()
        self._last = ""

    def say(self, text: str, done: int = 0, total: int = 0) -> None:
        if text != self._last:
            self._last = text
            print(f"[{time.perf_counter() - self._began_s:6.1f} s] {text}", file=self._stream, flush=True)

    def close(self) -> None:
        return None

    def abandon(self) -> None:
        return None


class RichProgress(Progress):
    """A line with spinner, bar and clock per thing; ended things stay above it."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars

        self._bars = Bars(
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            console=Console(stderr=True),
        )
        self._last = ""
        self._task: TaskID | None = None
        self._bars.start()

    def say(self, text: str, done: int = 0, total: int = 0) -> None:
        if text != self._last:
            self._end_task()
            self._task = self._bars.add_task(text, total=total or None)
            self._last = text
        if self._task is not None:
            self._bars.update(self._task, completed=done, total=total or None)

    def close(self) -> None:
        self._end_task()
        self._bars.stop()

    def abandon(self) -> None:
        self._task = None
        self._bars.stop()

    def _end_task(self) -> None:
        if self._task is not None:
            self._bars.update(self._task, total=1, completed=1)
            self._task = None


def make_progress() -> Progress:
    """A live line if standard error is a terminal and rich is installed, else plain lines."""
    if sys.stderr.isatty() and importlib.util.find_spec("rich") is not None:
        return RichProgress()
    return PlainProgress(sys.stderr)
