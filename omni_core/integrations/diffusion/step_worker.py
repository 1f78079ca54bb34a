# SPDX-License-Identifier: Apache-2.0
"""What the engine asks of the worker: where the rows of a request lie, and who attends over them."""

from __future__ import annotations

from typing import Protocol

from omni_core.diffusion_kv.attention.owner import AttentionOwner
from omni_core.diffusion_kv.snapshot import KVSnapshot


class StepWorker(Protocol):
    """One worker, dense or paged. The engine's one thread calls."""

    @property
    def owner(self) -> AttentionOwner:
        """Who keeps keys and values."""
        ...

    def install(self, snapshot: KVSnapshot) -> None:
        """Take the pages of one request.

        Raises:
            KVWorkerError: the snapshot contradicts what is held; nothing was changed.
        """
        ...

    def remove(self, request_id: str, generation: int | None) -> None:
        """Drop what is held of a request in this generation or an earlier one; of none, nothing.

        Args:
            request_id: of the request.
            generation: of its pages; `None` on a dense worker.

        Raises:
            Exception: it may still write to its pages. The engine stops.
        """
        ...

    def close(self) -> None:
        """Stop for good: after this no page is written. Idempotent."""
        ...
