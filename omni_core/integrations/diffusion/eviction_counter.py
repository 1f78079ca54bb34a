# SPDX-License-Identifier: Apache-2.0
"""Counts the published pages that vLLM's block pool hands to someone else."""

from __future__ import annotations

from typing import Any


class EvictionCounter:
    """A metrics collector in vLLM's sense (0.32: `KVCacheMetricsCollector`), told of every page of the pool.

    The pool tells of an eviction whenever it takes a page's hash, also when it is asked to; a page that is handed out
    right after lost it to someone else.
    """

    def __init__(self) -> None:
        self.evicted_pages = 0
        self._losing_its_hash: Any = None

    def on_block_evicted(self, block: Any) -> None:
        """`block` is about to lose its hash, if it has one."""
        self._losing_its_hash = None if block.block_hash is None else block

    def on_block_allocated(self, block: Any) -> None:
        """`block` was handed out."""
        if block is self._losing_its_hash:
            self.evicted_pages += 1
        self._losing_its_hash = None

    def on_block_accessed(self, block: Any) -> None:
        """`block` was hit."""

    def reset(self) -> None:
        """The pool forgot every hash. The count is since the start."""
