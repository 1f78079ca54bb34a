# SPDX-License-Identifier: Apache-2.0
"""The fast owner of pages on a CPU: vLLM's attention kernel, all pieces of all rows in one call per layer.

Facts of vLLM 0.32 (`v1/attention/backends/cpu_attn.py`, and the kernel driven by hand): it reads pages through a block
table and takes one causal flag per sequence (`dynamic_causal`, int32), aligned to the bottom right. So each piece of
each row is a sequence to it, and the queries of a forward need no copy. It reads the last page of a sequence whole and
multiplies what lies behind the sequence's end with zero, so that must be finite: a first step clears each row's last
page before it writes there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm import _custom_ops, envs
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, _get_attn_isa

from omni_core.diffusion_kv.attention.owner import KVShape
from omni_core.diffusion_kv.attention.paged import PagedAttention, PagedForward, PagedLayers
from omni_core.diffusion_kv.errors import DiffusionKVConfigError
from omni_core.diffusion_kv.worker.kv_worker import KVWorker

_BLOCK_MULTIPLE = 16
"""Of tokens per page; 32 is the fast one."""
_NO_WINDOW = -1
_NO_SOFTCAP = 0.0


def load_kernels() -> None:
    """Load vLLM's compiled operations into this process; again is harmless. Takes seconds the first time."""
    current_platform.import_kernels()


def check_kernel_shape(shape: KVShape, block_size: int, device: torch.device) -> None:
    """See that the kernel can serve these keys and values.

    Raises:
        DiffusionKVConfigError: device, dtype, head size or block size is not the kernel's; says which owner to use.
    """
    if device.type != "cpu":
        raise DiffusionKVConfigError(
            f"attention_owner=kernel: vLLM's CPU kernel, and the pages lie on {str(device)!r}; use that device's owner"
        )
    dtypes, head_sizes = CPUAttentionBackend.supported_dtypes, CPUAttentionBackend.get_supported_head_sizes()
    if shape.dtype not in dtypes:
        raise DiffusionKVConfigError(
            f"attention_owner=kernel: {shape.dtype} is none of {', '.join(map(str, dtypes))}; use "
            "attention_owner=gathered"
        )
    if shape.head_size not in head_sizes:
        raise DiffusionKVConfigError(
            f"attention_owner=kernel: head_size={shape.head_size} is none of {', '.join(map(str, head_sizes))}; use "
            "attention_owner=gathered"
        )
    if block_size % _BLOCK_MULTIPLE:
        raise DiffusionKVConfigError(
            f"attention_owner=kernel: block_size={block_size} is no multiple of {_BLOCK_MULTIPLE}; 32 is the fast one"
        )


class KernelAttention(PagedAttention):
    """vLLM's CPU kernel over pages. How tokens lie in a page is the kernel's."""

    def __init__(self, worker: KVWorker) -> None:
        """Load the kernel and allocate the index buffers.

        Raises:
            DiffusionKVConfigError: as `check_kernel_shape`.
        """
        check_kernel_shape(worker.shape, worker.pool.block_size, worker.memory.device)
        load_kernels()
        super().__init__(worker)
        self._isa = _get_attn_isa(worker.shape.dtype, worker.pool.block_size, worker.shape.head_size)
        self._sequence_tables = torch.empty((0, worker.tables.max_blocks_per_row), dtype=torch.int32)

    def _prepare(self, forward: PagedForward) -> PagedLayers:
        shape, pieces = self._worker.shape, forward.plan.pieces
        lengths = torch.tensor([piece.num_query_tokens for piece in pieces], dtype=torch.int32)
        starts = torch.zeros(forward.num_rows * len(pieces) + 1, dtype=torch.int32)
        torch.cumsum(lengths.repeat(forward.num_rows), 0, dtype=torch.int32, out=starts[1:])
        key_ends = torch.tensor([piece.key_end for piece in pieces], dtype=torch.int32).repeat(forward.num_rows)
        causal = torch.tensor([piece.causal for piece in pieces], dtype=torch.int32).repeat(forward.num_rows)
        metadata = _custom_ops.cpu_attn_get_scheduler_metadata(
            num_reqs=key_ends.numel(),
            num_heads=shape.num_query_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_size,
            seq_lens=key_ends,
            dtype=shape.dtype,
            query_start_loc=starts,
            causal=False,
            sliding_window_size=_NO_WINDOW,
            isa=self._isa,
            enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
            dynamic_causal=causal,
        )
        return _KernelLayers(
            isa=self._isa,
            scale=shape.head_size**-0.5,
            slots=forward.slots,
            fresh_pages=forward.fresh_pages,
            block_tables=self._tables_of_sequences(forward),
            starts=starts,
            key_ends=key_ends,
            causal=causal,
            scheduler_metadata=metadata,
        )

    def _tables_of_sequences(self, forward: PagedForward) -> torch.Tensor:
        """`[rows * pieces, max_blocks_per_row]`: each row's table once per piece. The buffer grows in the warm-up."""
        count = forward.num_rows * len(forward.plan.pieces)
        if self._sequence_tables.shape[0] < count:
            self._sequence_tables = torch.empty((count, self._sequence_tables.shape[1]), dtype=torch.int32)
        tables = self._sequence_tables[:count]
        tables.view(forward.num_rows, -1, tables.shape[1]).copy_(forward.block_tables[:, None])
        return tables


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _KernelLayers:
    """One forward."""

    isa: str
    scale: float
    slots: torch.Tensor
    fresh_pages: torch.Tensor | None
    block_tables: torch.Tensor
    starts: torch.Tensor
    key_ends: torch.Tensor
    causal: torch.Tensor
    scheduler_metadata: Any

    def write(self, pages: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        if self.fresh_pages is not None:
            pages.index_fill_(0, self.fresh_pages, 0.0)
        keys, values = pages.chunk(2, dim=2)
        _custom_ops.cpu_attn_reshape_and_cache(
            key.reshape(-1, *key.shape[2:]),
            value.reshape(-1, *value.shape[2:]),
            keys,
            values,
            self.slots,
            self.isa,
        )

    def attend(self, pages: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        keys, values = pages.chunk(2, dim=2)
        query = query.contiguous()
        output = torch.empty_like(query)
        _custom_ops.cpu_attention_with_kv_cache(
            query=query.view(-1, *query.shape[2:]),
            key_cache=keys,
            value_cache=values,
            output=output.view(-1, *query.shape[2:]),
            query_start_loc=self.starts,
            seq_lens=self.key_ends,
            scale=self.scale,
            causal=False,
            alibi_slopes=None,
            sliding_window=_NO_WINDOW,
            block_table=self.block_tables,
            softcap=_NO_SOFTCAP,
            scheduler_metadata=self.scheduler_metadata,
            s_aux=None,
            dynamic_causal=self.causal,
        )
        return output
