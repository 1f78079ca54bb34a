# SPDX-License-Identifier: Apache-2.0
"""Ranks over torch's process groups. The group decides the transport; gloo is the one CI runs."""

from __future__ import annotations

import torch
from torch import distributed

from omni_core.diffusion_kv.errors import DiffusionKVConfigError


class ProcessGroupRanks:
    """A `RankGroup` over one process group. Every call blocks until all ranks made it, at most the group's time-out."""

    def __init__(self, group: distributed.ProcessGroup) -> None:
        """Speak through a group that exists; it stays the caller's.

        Raises:
            DiffusionKVConfigError: this process is no member of it.
        """
        rank = distributed.get_rank(group)
        if rank < 0:
            raise DiffusionKVConfigError(
                f"process {distributed.get_rank()} is not in the group it was given; make each group with its own ranks"
            )
        self._group = group
        self._rank = rank
        self._size = distributed.get_world_size(group)

    @property
    def size(self) -> int:
        return self._size

    @property
    def rank(self) -> int:
        return self._rank

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum, in `tensor` itself where that is contiguous.

        Raises:
            RuntimeError: a rank is gone, or the time-out passed.
        """
        total = tensor.contiguous()
        distributed.all_reduce(total, group=self._group)
        return total

    def all_gather(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Every rank's tensor, in rank order.

        Raises:
            RuntimeError: a rank is gone, or the time-out passed.
        """
        own = tensor.contiguous()
        gathered = [torch.empty_like(own) for _ in range(self._size)]
        distributed.all_gather(gathered, own, group=self._group)
        return tuple(gathered)
