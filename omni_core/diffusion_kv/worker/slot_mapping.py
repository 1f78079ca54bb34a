# SPDX-License-Identifier: Apache-2.0
"""Where the tokens of a forward are written: slot = page * block_size + place in the page."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from omni_core.diffusion_kv.errors import PagedAttentionError
from omni_core.diffusion_kv.worker.kv_worker import KVWorker
from omni_core.diffusion_kv.worker.page_pool import NULL_PAGE


class SlotMapping:
    """The slots of one forward at a time, in buffers made once. The worker's thread."""

    def __init__(self, worker: KVWorker) -> None:
        """Room for every row the worker can hold. Allocates; before the worker serves."""
        tables, block_size = worker.tables, worker.pool.block_size
        row_tokens = tables.max_blocks_per_row * block_size
        positions = np.arange(row_tokens)
        self._worker = worker
        self._block_size = block_size
        self._block_of = positions // block_size
        self._place_of = positions % block_size
        self._first_slots = np.empty((tables.num_rows, tables.max_blocks_per_row), dtype=np.int64)
        self._host = np.empty(tables.num_rows * row_tokens, dtype=np.int64)
        self._host_tensor = torch.from_numpy(self._host)
        (self._device,) = worker.memory.allocate(1, self._host.shape, torch.int64)

    @property
    def max_tokens(self) -> int:
        """Tokens of the largest forward."""
        return self._host.size

    def map(self, table_rows: npt.NDArray[np.intp], start: int, end: int) -> torch.Tensor:
        """The slots of the tokens `[start, end)` of some rows.

        Args:
            table_rows: `[rows]`, rows of the block tables.
            start: first token's position in every row.
            end: position after the last one, within each row's pages.

        Returns:
            int64 `[rows * (end - start)]` on the device, row by row; valid until the next call.

        Raises:
            PagedAttentionError: a token would be written to the null page or to a page that a row hits.
        """
        first_block, last_block = start // self._block_size, (end - 1) // self._block_size
        pages = self._worker.tables.host[table_rows, first_block : last_block + 1]
        self._check_writable(pages, start, end)
        first_slots = self._first_slots[: pages.shape[0], : pages.shape[1]]
        np.multiply(pages, self._block_size, out=first_slots, dtype=np.int64)
        count = pages.shape[0] * (end - start)
        slots = self._host[:count].reshape(pages.shape[0], end - start)
        np.take(first_slots, self._block_of[start:end] - first_block, axis=1, out=slots, mode="clip")
        slots += self._place_of[start:end]
        return self._device[:count].copy_(self._host_tensor[:count])

    def _check_writable(self, pages: npt.NDArray[np.int32], start: int, end: int) -> None:
        read_only = (pages == NULL_PAGE) | (self._worker.cached_readers[pages] > 0)
        if read_only.any():
            page = int(pages[read_only][0])
            reason = "vLLM's null page" if page == NULL_PAGE else "hit by a row"
            raise PagedAttentionError(
                f"tokens [{start}, {end}) would be written to page {page}, which is {reason} and is never written"
            )
