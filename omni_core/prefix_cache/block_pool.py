# SPDX-License-Identifier: Apache-2.0
"""The durable rows: per key one host tensor over all slots of the mirrored KV cache."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from omni_core.backend.host_pages import reserve_pages
from omni_core.prefix_cache.errors import HostMemoryError

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
"""Rows are moved as the widest words that divide them: element by element costs more, and torch cannot index the
rows of every dtype (float8, unsigned integers)."""


@dataclass(frozen=True, slots=True)
class RowSpec:
    """What one row of a key looks like."""

    trailing_shape: tuple[int, ...]
    """Shape of a row; `()` for one number per token."""
    dtype: torch.dtype

    @property
    def width(self) -> int:
        """Elements per row."""
        return math.prod(self.trailing_shape)

    @property
    def row_bytes(self) -> int:
        """Bytes per row."""
        return self.width * self.dtype.itemsize

    @property
    def word(self) -> torch.dtype:
        """The dtype rows are moved as: the widest integer that divides a row."""
        return next(word for word in _WORDS if self.row_bytes % word.itemsize == 0)

    @property
    def row_words(self) -> int:
        """Words per row."""
        return self.row_bytes // self.word.itemsize


class BlockMap:
    """Where a KV block's rows lie in the host pool: the identity, while the pool has a place for every block."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size

    def host_slots(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Rows of the host pool for KV slots."""
        return slots

    def whole_blocks(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Host blocks that the longest front part of `slots` covers whole and in order; empty if none."""
        count = len(slots) // self.block_size
        if count == 0:
            return slots[:0]
        runs = slots[: count * self.block_size].reshape(count, self.block_size)
        firsts = runs[:, 0]
        offsets = np.arange(self.block_size, dtype=np.int64)
        whole = (firsts % self.block_size == 0) & (runs == firsts[:, None] + offsets).all(axis=1)
        covered = count if whole.all() else int(np.argmin(whole))
        return self.host_slots(firsts[:covered]) // self.block_size


class PrefixBlockPool:
    """Rows of every stored key, flat as `(num_blocks * block_size, row_words)`, pageable, committed when touched.

    Readers and the one writer are kept apart by the controller's protocol, not by a lock here. Rows are moved as bytes:
    nothing is ever cast.
    """

    def __init__(self, block_map: BlockMap) -> None:
        self._block_map = block_map
        self._specs: dict[str, RowSpec] = {}
        self._rows: dict[str, torch.Tensor] = {}
        self._prepared: dict[str, tuple[RowSpec, torch.Tensor]] = {}

    @property
    def specs(self) -> dict[str, RowSpec]:
        """Stored keys and their rows."""
        return dict(self._specs)

    @property
    def reserved_bytes(self) -> dict[str, int]:
        """Key → address space of its rows, prepared keys included. State lock held."""
        return {key: rows.numel() * rows.element_size() for key, rows in self.all_rows.items()}

    @property
    def all_rows(self) -> dict[str, torch.Tensor]:
        """Key → its rows, prepared keys included. State lock held."""
        return {key: rows for key, (_, rows) in self._prepared.items()} | self._rows

    def __contains__(self, key: str) -> bool:
        return key in self._specs

    def spec(self, key: str) -> RowSpec:
        """What a row of the stored `key` looks like."""
        return self._specs[key]

    def reserve(self, key: str, spec: RowSpec) -> torch.Tensor:
        """Rows for a key: those prepared for it, or fresh ones, which cost no memory until rows are written.

        Engine thread, no lock held.

        Raises:
            HostMemoryError: the operating system has not so much address space; names the key and the sizes.
        """
        prepared = self._prepared.get(key)
        if prepared is not None and prepared[0] == spec:
            return prepared[1]
        num_blocks, block_size = self._block_map.num_blocks, self._block_map.block_size
        word, row_bytes = spec.word, spec.row_bytes
        try:
            words = reserve_pages(num_blocks * block_size * row_bytes, overcommit=True, dtype=word)
        except MemoryError as error:
            raise HostMemoryError(
                f"key {key!r}: num_blocks={num_blocks} x block_size={block_size} x {row_bytes} bytes of row: "
                f"{error}; give the engine fewer blocks"
            ) from error
        with torch.inference_mode(False):
            return words.view(num_blocks * block_size, row_bytes // word.itemsize)

    def prepare(self, rows: Mapping[str, tuple[RowSpec, torch.Tensor]]) -> None:
        """Keep rows from `reserve` for the first save of their keys. State lock held, before the first step."""
        self._prepared = dict(rows)

    def add_key(self, key: str, spec: RowSpec, rows: torch.Tensor) -> None:
        """Begin to keep `key` in rows from `reserve`. State lock held: others look keys up under it."""
        self._rows[key] = rows
        self._specs[key] = spec
        self._prepared.pop(key, None)

    def gather(self, key: str, slots: npt.NDArray[np.int64], out: torch.Tensor) -> None:
        """Copy the rows at `slots` into `out` `(len(slots), row_words)`, whole blocks at a time where possible."""
        rows = self._rows[key]
        block_size = self._block_map.block_size
        blocks = self._block_map.whole_blocks(slots)
        done = len(blocks) * block_size
        if done:
            by_block = rows.view(-1, block_size * rows.shape[1])
            target = out[:done].view(len(blocks), block_size * rows.shape[1])
            torch.index_select(by_block, 0, torch.from_numpy(blocks), out=target)
        if done < len(slots):
            rest = self._block_map.host_slots(slots[done:])
            torch.index_select(rows, 0, torch.from_numpy(np.ascontiguousarray(rest)), out=out[done:])

    def scatter(self, key: str, slots: npt.NDArray[np.int64], rows: torch.Tensor) -> None:
        """Write `rows` `(len(slots), row_words)` to `slots`, which are distinct. Committer thread only."""
        host_slots = torch.from_numpy(self._block_map.host_slots(slots))
        self._rows[key].index_copy_(0, host_slots, rows)
