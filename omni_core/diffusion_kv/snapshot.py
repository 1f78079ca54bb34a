# SPDX-License-Identifier: Apache-2.0
"""What the scheduler tells the worker about one request's pages: plain numbers, fit for any wire.

No hashes, no token ids, no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from omni_core.diffusion_kv.rows import RowGeometry


@dataclass(frozen=True, slots=True)
class RowSnapshot:
    """The pages of one row."""

    row_index: int
    """Which CFG branch; 0, 1, … in the order of the request's rows."""
    geometry: RowGeometry
    cached_prefix_tokens: int
    """Leading tokens whose pages already hold their keys and values; whole pages, at most the prefix."""
    block_ids: tuple[tuple[int, ...], ...]
    """Per KV cache group, the pages of the whole row in order. Page 0 is vLLM's null page and never stands here."""


@dataclass(frozen=True, slots=True)
class KVSnapshot:
    """All rows of one request, reserved together."""

    request_id: str
    generation: int
    """Grows with each reservation, so that a late removal of an earlier one of this id is told apart."""
    rows: tuple[RowSnapshot, ...]
