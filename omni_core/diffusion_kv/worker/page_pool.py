# SPDX-License-Identifier: Apache-2.0
"""Keys and values of a stage on this rank, in pages: one tensor per layer, allocated once."""

from __future__ import annotations

import torch

from omni_core.diffusion_kv.attention.owner import KVShape
from omni_core.diffusion_kv.errors import DiffusionKVConfigError
from omni_core.diffusion_kv.worker.device_memory import DeviceMemory

NULL_PAGE = 0
"""vLLM's null page: never a row's."""


class KVPagePool:
    """`num_blocks` pages of `block_size` tokens in every layer; page 0 is vLLM's null page.

    A layer is `[num_blocks, num_kv_heads, 2 * block_size, head_size]`, the layout vLLM's CPU kernel reads: the first
    half of a page's third dimension belongs to keys, the second to values. How tokens lie within a half is up to the
    attention owner; a pool has one owner. A fresh page holds arbitrary bytes.
    """

    def __init__(self, shape: KVShape, num_blocks: int, block_size: int, memory: DeviceMemory) -> None:
        """Allocate every page.

        Raises:
            DiffusionKVConfigError: fewer than two pages, or no token per page.
            MemoryError: the device has not that much.
        """
        if num_blocks < 2:
            raise DiffusionKVConfigError(
                f"num_blocks={num_blocks}: page {NULL_PAGE} is vLLM's null page, so a pool has at least 2"
            )
        if block_size < 1:
            raise DiffusionKVConfigError(f"block_size={block_size}; a page holds at least one token")
        self._block_size = block_size
        self._layers = memory.allocate(
            shape.num_layers, (num_blocks, shape.num_kv_heads, 2 * block_size, shape.head_size), shape.dtype
        )

    @property
    def layers(self) -> tuple[torch.Tensor, ...]:
        """Every layer's pages, written in place by the attention owner alone."""
        return self._layers

    @property
    def num_blocks(self) -> int:
        """Pages of each layer, the null page included."""
        return self._layers[0].shape[0]

    @property
    def block_size(self) -> int:
        """Tokens per page."""
        return self._block_size

    @property
    def nbytes(self) -> int:
        """Device bytes of all pages."""
        return sum(layer.nbytes for layer in self._layers)

    def page(self, layer_index: int, page_id: int) -> torch.Tensor:
        """A view of one page, `[num_kv_heads, 2 * block_size, head_size]`."""
        return self._layers[layer_index][page_id]
