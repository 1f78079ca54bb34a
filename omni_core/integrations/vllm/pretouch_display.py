# SPDX-License-Identifier: Apache-2.0
"""Shows how far the pre-touch of the pool has come: a bar on a terminal, else a log line every few seconds."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from omni_core.prefix_cache.pretouch import OnPretouch, PretouchProgress
from omni_core.runtime import Runtime

_LOG = logging.getLogger(__name__)
_LINE_EVERY_S = 5.0
_GIB = 1 << 30


@contextmanager
def pretouch_display(runtime: Runtime) -> Iterator[OnPretouch]:
    """What `register_policy` is given as `on_pretouch`, valid inside the block. Draws with rich, if it is installed."""
    if sys.stderr.isatty() and find_spec("rich") is not None:
        with _bar() as show:
            yield show
    else:
        yield _Lines(runtime).show


class _Lines:
    """A log line at the start, at the end, and at most every `_LINE_EVERY_S` between."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._began_s = self._last_s = runtime.monotonic_s()
        self._lines = 0

    def show(self, progress: PretouchProgress) -> None:
        """Perhaps a line."""
        now_s = self._runtime.monotonic_s()
        ended = progress.done_bytes == progress.total_bytes
        if self._lines and not ended and now_s - self._last_s < _LINE_EVERY_S:
            return
        self._lines += 1
        self._last_s = now_s
        _LOG.info(
            "pre-touch of the pool: %.2f of %.2f GiB after %.0f s",
            progress.done_bytes / _GIB,
            progress.total_bytes / _GIB,
            now_s - self._began_s,
        )


@contextmanager
def _bar() -> Iterator[OnPretouch]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True))
    task = bar.add_task("pre-touch of the pool", total=None)

    def show(progress: PretouchProgress) -> None:
        bar.start()
        bar.update(task, completed=progress.done_bytes, total=progress.total_bytes)

    try:
        yield show
    finally:
        bar.stop()
