# SPDX-License-Identifier: Apache-2.0
"""Notices that vLLM is about to load an adapter whose files are not those it loaded last under the same id.

vLLM reads an adapter's files in the middle of a step if it does not hold the adapter (any more), and in every step with
a request whose `load_inplace` is set (`lora/worker_manager.py`, `LRUCacheWorkerLoRAManager.add_adapter`). A server that
was told to load an adapter in place sets it for all requests from then on. So that a step reads files means nothing;
that they are other files does. What `add_lora` reads between steps is remembered too: a step may read it again.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from typing import Protocol

Fingerprint = tuple[tuple[str, int, int], ...]
"""Of each file of an adapter: name, size in bytes, time of change in ns. Empty where the path is no local folder."""


class AdapterRequest(Protocol):
    """What is read of vLLM's `LoRARequest`."""

    @property
    def lora_int_id(self) -> int: ...

    @property
    def lora_path(self) -> str: ...

    @property
    def load_inplace(self) -> bool: ...


class AdapterFiles:
    """Which files each adapter of a worker was last loaded from. Engine thread."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[str, Fingerprint]] = {}

    def about_to_read(self, request: AdapterRequest) -> None:
        """Remember what vLLM is about to read between steps. Before it does: files that change meanwhile are others."""
        self._seen[request.lora_int_id] = request.lora_path, _fingerprint(request.lora_path)

    def forget(self, adapter_id: int) -> None:
        """The adapter was removed, and its rows given up: whatever is read under this id next is no change."""
        self._seen.pop(adapter_id, None)

    def changed(self, requests: Iterable[AdapterRequest], loaded: Collection[int]) -> list[int]:
        """Adapters that a step will read from other files than before.

        Reads the entries of an adapter's folder, not its files, and only if vLLM is about to read the files: in every
        step for an adapter with `load_inplace`, else when it is not loaded. Blocks as long as the file system does.

        Args:
            requests: the adapters of the step's requests; one may be named more than once.
            loaded: ids of the adapters vLLM holds.
        """
        changed = []
        for request in requests:
            adapter_id = request.lora_int_id
            if not request.load_inplace and adapter_id in loaded and adapter_id in self._seen:
                continue
            now = request.lora_path, _fingerprint(request.lora_path)
            if self._seen.setdefault(adapter_id, now) != now:
                self._seen[adapter_id] = now
                changed.append(adapter_id)
        return changed


def _fingerprint(path: str) -> Fingerprint:
    try:
        with os.scandir(path) as entries:
            return tuple(sorted((entry.name, (told := entry.stat()).st_size, told.st_mtime_ns) for entry in entries))
    except OSError:
        return ()
