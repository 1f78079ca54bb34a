# SPDX-License-Identifier: Apache-2.0
"""Commits reserved memory at start, on several threads: one thread takes tens of minutes for hundreds of GiB."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from omni_core.backend.host_pages import commit_pages
from omni_core.prefix_cache.errors import HostMemoryError, JoinTimeoutError
from omni_core.runtime import Runtime, ThreadHandle

PIECE_BYTES = 64 << 20
"""What a thread commits between two looks at the others."""
MAX_THREADS = 8
"""The kernel clears pages no faster with more."""
_PROGRESS_S = 0.5
"""How often the caller's callback is told, at least."""


@dataclass(frozen=True, slots=True)
class PretouchProgress:
    """How far the pre-touch has come."""

    done_bytes: int
    total_bytes: int


OnPretouch = Callable[[PretouchProgress], None]
"""Called on the thread that waits, at the start, every half a second, and at the end."""


def pretouch(
    ranges: Sequence[torch.Tensor],
    runtime: Runtime,
    *,
    stuck_after_s: float,
    on_progress: OnPretouch | None = None,
    commit: Callable[[torch.Tensor], None] = commit_pages,
) -> None:
    """Commit the memory of every range. Slow; at start, before anybody writes there. Hold no lock.

    Args:
        ranges: flat uint8 CPU tensors of `reserve_pages`.
        runtime: makes the threads.
        stuck_after_s: how long no thread may finish a piece.
        on_progress: told how far it has come.
        commit: what commits one piece.

    Raises:
        HostMemoryError: the operating system has no memory for a piece; the threads have ended.
        JoinTimeoutError: no piece was finished within `stuck_after_s`.
    """
    pieces = [piece for pages in ranges for piece in torch.split(pages, PIECE_BYTES)]
    work = _Work(pieces, runtime, commit)
    tell = on_progress or (lambda _: None)
    num_threads = min(MAX_THREADS, os.cpu_count() or 1, len(pieces))
    handles: list[ThreadHandle] = []
    try:
        handles.extend(runtime.spawn(f"omni-core-pretouch-{number}", work.run) for number in range(num_threads))
        tell(work.progress)
        last_done, last_s = 0, runtime.monotonic_s()
        while not work.wait_ended(_PROGRESS_S):
            progress, now_s = work.progress, runtime.monotonic_s()
            tell(progress)
            if progress.done_bytes > last_done:
                last_done, last_s = progress.done_bytes, now_s
            elif now_s - last_s > stuck_after_s:
                raise JoinTimeoutError(
                    f"pretouch: no piece of {PIECE_BYTES} bytes was committed within join_timeout_s={stuck_after_s}; "
                    f"{progress.done_bytes} of {progress.total_bytes} bytes are; set pretouch=False"
                )
    finally:
        work.stop()
        for handle in handles:
            handle.join(stuck_after_s)
    if work.error is not None:
        raise HostMemoryError(
            f"pretouch: {work.progress.done_bytes} of {work.progress.total_bytes} bytes were committed, then: "
            f"{work.error}; give the engine fewer blocks, or set pretouch=False"
        ) from work.error
    tell(work.progress)


class _Work:
    """Pieces that threads take one after another."""

    def __init__(
        self, pieces: Sequence[torch.Tensor], runtime: Runtime, commit: Callable[[torch.Tensor], None]
    ) -> None:
        self._commit = commit
        self._lock = runtime.lock("pretouch")
        self._ended = runtime.condition(self._lock, "pretouch-ended")
        self._left = list(reversed(pieces))
        self._running = 0
        self._total_bytes = sum(piece.numel() for piece in pieces)
        self._done_bytes = 0
        self.error: Exception | None = None

    @property
    def progress(self) -> PretouchProgress:
        return PretouchProgress(self._done_bytes, self._total_bytes)

    def wait_ended(self, timeout_s: float) -> bool:
        with self._lock:
            return self._ended.wait_for(lambda: not self._left and self._running == 0, timeout_s)

    def stop(self) -> None:
        with self._lock:
            self._left.clear()

    def run(self) -> None:
        while (piece := self._take()) is not None:
            error: Exception | None = None
            try:
                self._commit(piece)
            except Exception as caught:  # told on the thread that waits
                error = caught
            self._finish(piece, error)

    def _take(self) -> torch.Tensor | None:
        with self._lock:
            if not self._left:
                return None
            self._running += 1
            return self._left.pop()

    def _finish(self, piece: torch.Tensor, error: Exception | None) -> None:
        with self._lock:
            self._running -= 1
            if error is None:
                self._done_bytes += piece.numel()
            else:
                self.error = self.error or error
                self._left.clear()
            self._ended.notify_all()
