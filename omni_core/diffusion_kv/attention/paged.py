# SPDX-License-Identifier: Apache-2.0
"""What every owner of pages shares: which tokens, which pieces, which slots, and the order of writing and reading.

Keys and values of all query tokens of a layer are in their pages before any of the layer's queries is computed. An
owner for another device brings the two halves, writing and attending, and is made with a `KVWorker` of that device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from omni_core.diffusion_kv.attention.owner import RowKey
from omni_core.diffusion_kv.attention.pieces import PiecePlan, plan_pieces
from omni_core.diffusion_kv.attention.step_checks import LayerChecks, check_rows
from omni_core.diffusion_kv.errors import PagedAttentionError
from omni_core.diffusion_kv.rows import RowLayout
from omni_core.diffusion_kv.worker.kv_worker import InstalledRow, KVWorker
from omni_core.diffusion_kv.worker.slot_mapping import SlotMapping


@dataclass(frozen=True, slots=True, eq=False)
class PagedForward:
    """One forward, as the writing and attending halves need it."""

    layout: RowLayout
    plan: PiecePlan
    num_rows: int
    slots: torch.Tensor
    """int64 `[rows * query tokens]`, row by row."""
    block_tables: torch.Tensor
    """int32 `[rows, max_blocks_per_row]`: each row's pages in order, then the null page."""
    fresh_pages: torch.Tensor | None
    """int64 page ids: in a first step each row's last page, of which nothing is worth keeping. `None` in a later one:
    the last page may hold the end of the prefix."""

    @property
    def num_query_tokens(self) -> int:
        """Of each row."""
        return self.plan.query_end - self.plan.query_start


class PagedLayers(Protocol):
    """The two halves, prepared for one forward. `pages` is a layer of the pool; the tensors have been checked."""

    def write(self, pages: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Put the forward's keys and values, `[rows, query tokens, num_kv_heads, head_size]`, into its slots."""
        ...

    def attend(self, pages: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        """The forward's pieces over the pages; `[rows, query tokens, num_query_heads, head_size]` in and out."""
        ...


class PagedAttention(ABC):
    """An `AttentionOwner` over the pages of a `KVWorker`. One per worker; the worker's thread."""

    def __init__(self, worker: KVWorker) -> None:
        """Allocate the index buffers; no forward allocates any."""
        self._worker = worker
        self._slots = SlotMapping(worker)
        self._table_rows = torch.from_numpy(np.zeros(worker.tables.num_rows, dtype=np.int64))
        self._device_table_rows, self._fresh_pages = worker.memory.allocate(2, self._table_rows.shape, torch.int64)
        (self._block_tables,) = worker.memory.allocate(1, worker.tables.host.shape, torch.int32)
        self._forwards = 0

    @property
    def worker(self) -> KVWorker:
        """Who says which rows have which pages."""
        return self._worker

    def first_step(self, rows: Sequence[RowKey], layout: RowLayout) -> PagedStep:
        """Attention over `[hit, total)` of each row; writes those positions.

        Raises:
            PagedAttentionError: a row is not installed, had its first step already, is of another geometry, or the
                rows' hits differ.
        """
        installed = self._installed(rows, layout)
        for key, row in zip(rows, installed, strict=True):
            if row.first_step_done:
                raise PagedAttentionError(
                    f"{key}: its first step was computed; its prefix may be others' hit and is not written again"
                )
        hits = {row.snapshot.cached_prefix_tokens for row in installed}
        if len(hits) > 1:
            raise PagedAttentionError(
                f"rows of one forward hit {sorted(hits)} tokens; they start at one token, so they need one hit"
            )
        return self._begin(rows, installed, layout, hits.pop(), layout.geometry.total_tokens, fresh_last_pages=True)

    def later_step(self, rows: Sequence[RowKey], layout: RowLayout) -> PagedStep:
        """Attention over `[prefix, prefix + target)`; the trailer is not seen.

        Raises:
            PagedAttentionError: a row is not installed, had no complete first step, or is of another geometry.
        """
        installed = self._installed(rows, layout)
        for key, row in zip(rows, installed, strict=True):
            if not row.first_step_done:
                raise PagedAttentionError(f"{key}: a later step, but its first one was not computed in every layer")
        geometry = layout.geometry
        start, end = geometry.prefix_tokens, geometry.target_end
        return self._begin(rows, installed, layout, start, end, fresh_last_pages=False)

    @abstractmethod
    def _prepare(self, forward: PagedForward) -> PagedLayers:
        """The halves for one forward. The forward's tensors stay as they are until the next call."""

    def is_current(self, forward_number: int) -> bool:
        """Whether no forward has begun since this one, and the pages are there."""
        return forward_number == self._forwards and not self._worker.closed

    def _installed(self, rows: Sequence[RowKey], layout: RowLayout) -> list[InstalledRow]:
        if self._worker.closed:
            raise PagedAttentionError("the worker was closed, and its pages are gone")
        installed = []
        for key in check_rows(rows):
            row = self._worker.row(key)
            if row is None:
                raise PagedAttentionError(f"{key}: it has no pages on this worker; install its snapshot first")
            if row.snapshot.geometry != layout.geometry:
                raise PagedAttentionError(f"{key}: its pages are for {row.snapshot.geometry}, not {layout.geometry}")
            installed.append(row)
        return installed

    def _begin(
        self,
        rows: Sequence[RowKey],
        installed: Sequence[InstalledRow],
        layout: RowLayout,
        start: int,
        end: int,
        *,
        fresh_last_pages: bool,
    ) -> PagedStep:
        plan = plan_pieces(layout, start, end)
        num_rows = len(installed)
        table_rows = self._table_rows.numpy()[:num_rows]
        table_rows[:] = [row.table_row for row in installed]
        slots = self._slots.map(table_rows, start, end)
        on_device = self._device_table_rows[:num_rows].copy_(self._table_rows[:num_rows])
        block_tables = self._block_tables[:num_rows]
        torch.index_select(self._worker.tables.device, 0, on_device, out=block_tables)
        fresh_pages = None
        if fresh_last_pages:
            last_block = (end - 1) // self._worker.pool.block_size
            fresh_pages = self._fresh_pages[:num_rows].copy_(block_tables[:, last_block])
        self._forwards += 1
        forward = PagedForward(layout, plan, num_rows, slots, block_tables, fresh_pages)
        return PagedStep(self, self._forwards, tuple(rows), installed, forward, self._prepare(forward))


class PagedStep:
    """`StepAttention` over pages."""

    def __init__(
        self,
        owner: PagedAttention,
        number: int,
        rows: tuple[RowKey, ...],
        installed: Sequence[InstalledRow],
        forward: PagedForward,
        layers: PagedLayers,
    ) -> None:
        pool = owner.worker.pool
        self._owner = owner
        self._number = number
        self._rows = rows
        self._installed = installed
        self._plan = forward.plan
        self._layers = layers
        self._pages = pool.layers
        self._checks = LayerChecks(owner.worker.shape, pool.layers[0].device, len(rows), forward.num_query_tokens)

    @property
    def rows(self) -> tuple[RowKey, ...]:
        return self._rows

    @property
    def query_start_tokens(self) -> int:
        return self._plan.query_start

    @property
    def num_query_tokens(self) -> int:
        return self._plan.query_end - self._plan.query_start

    def attend(self, layer_index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if not self._owner.is_current(self._number):
            raise PagedAttentionError("this forward's attention is over: another forward began, or the worker closed")
        self._checks.check(layer_index, query, key, value)
        pages = self._pages[layer_index]
        self._layers.write(pages, key, value)
        attended = self._layers.attend(pages, query)
        self._checks.mark(layer_index)
        if self._checks.complete:
            for row in self._installed:
                row.first_step_done = True
        return attended
