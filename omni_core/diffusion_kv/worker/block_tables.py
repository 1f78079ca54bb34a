# SPDX-License-Identifier: Apache-2.0
"""Which pages each row has, in order: a table of fixed size whose rows are taken and given back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from omni_core.diffusion_kv.worker.device_memory import DeviceMemory
from omni_core.diffusion_kv.worker.page_pool import NULL_PAGE


class BlockTables:
    """`num_rows` rows of `max_blocks_per_row` int32 page ids, on the host and on the device. The worker's thread."""

    def __init__(self, num_rows: int, max_blocks_per_row: int, memory: DeviceMemory) -> None:
        """All rows free."""
        self._host = np.full((num_rows, max_blocks_per_row), NULL_PAGE, dtype=np.int32)
        self._host_tensor = torch.from_numpy(self._host)
        (self._device,) = memory.allocate(1, self._host.shape, torch.int32)
        self._device.copy_(self._host_tensor)
        self._free = list(reversed(range(num_rows)))

    @property
    def num_rows(self) -> int:
        return self._host.shape[0]

    @property
    def num_free_rows(self) -> int:
        return len(self._free)

    @property
    def max_blocks_per_row(self) -> int:
        return self._host.shape[1]

    @property
    def host(self) -> npt.NDArray[np.int32]:
        """`[num_rows, max_blocks_per_row]`, to read; unused entries are the null page."""
        return self._host

    @property
    def device(self) -> torch.Tensor:
        """The same on the device, int32, to read."""
        return self._device

    def take(self, page_ids: Sequence[int]) -> int:
        """A free row, filled. There must be one, and it must be long enough: `snapshot_checks` asks first.

        Returns:
            Its number, until `give_back`.
        """
        row = self._free.pop()
        self._host[row] = NULL_PAGE
        self._host[row, : len(page_ids)] = page_ids
        self._device[row].copy_(self._host_tensor[row])
        return row

    def give_back(self, row: int) -> None:
        """Free a row; its entries become the null page."""
        self._host[row] = NULL_PAGE
        self._device[row].copy_(self._host_tensor[row])
        self._free.append(row)
