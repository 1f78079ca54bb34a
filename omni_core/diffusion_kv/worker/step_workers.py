# SPDX-License-Identifier: Apache-2.0
"""One rank's worker as the engine loop calls it: rows installed and removed, and who attends over them."""

from __future__ import annotations

from omni_core.diffusion_kv.attention.dense import DenseAttention
from omni_core.diffusion_kv.attention.paged import PagedAttention
from omni_core.diffusion_kv.errors import KVWorkerError
from omni_core.diffusion_kv.snapshot import KVSnapshot
from omni_core.diffusion_kv.worker.kv_worker import KVWorker


class PagedStepWorker:
    """Pages of a scheduler. The engine's one thread."""

    def __init__(self, owner: PagedAttention) -> None:
        """Serve with `owner`, and close its `KVWorker` at the end."""
        self._owner = owner

    @property
    def owner(self) -> PagedAttention:
        """Who keeps keys and values."""
        return self._owner

    @property
    def kv_worker(self) -> KVWorker:
        """The pages and block tables."""
        return self._owner.worker

    def install(self, snapshot: KVSnapshot) -> None:
        """Take the pages of one request.

        Raises:
            KVWorkerError: as `KVWorker.install`.
        """
        self._owner.worker.install(snapshot)

    def remove(self, request_id: str, generation: int | None) -> None:
        """Drop what is held of a request in this generation or an earlier one.

        Raises:
            KVWorkerError: no generation; a late removal could not be told from a timely one.
        """
        if generation is None:
            raise KVWorkerError(
                f"request {request_id!r}: rows in pages are removed by their generation; none was given"
            )
        self._owner.worker.remove(request_id, generation)

    def close(self) -> None:
        """Free the pages: no forward begins or goes on. Idempotent."""
        self._owner.worker.close()


class DenseStepWorker:
    """Keys and values of the worker's own. The engine's one thread."""

    def __init__(self, owner: DenseAttention) -> None:
        self._owner = owner

    @property
    def owner(self) -> DenseAttention:
        """Who keeps keys and values."""
        return self._owner

    def install(self, snapshot: KVSnapshot) -> None:
        """Refuse.

        Raises:
            KVWorkerError: always: a dense worker has no page, so a scheduler that sends some counts on another mode.
        """
        raise KVWorkerError(
            f"request {snapshot.request_id!r}: a snapshot of pages for a worker of diffusion_kv_mode=dense_legacy, "
            "which has none"
        )

    def remove(self, request_id: str, generation: int | None) -> None:
        """Drop what is held of a request; of none, nothing. There are no generations."""
        self._owner.release(request_id)

    def close(self) -> None:
        """Drop everything. Idempotent."""
        for request_id in self._owner.request_ids:
            self._owner.release(request_id)
