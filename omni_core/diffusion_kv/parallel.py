# SPDX-License-Identifier: Apache-2.0
"""The ranks of one model: tensor parallel splits heads, CFG parallel splits rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


class RankGroup(Protocol):
    """Ranks that work on one thing together. Every rank makes the same calls in the same order; each call blocks."""

    @property
    def size(self) -> int: ...

    @property
    def rank(self) -> int: ...

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, which may be `tensor` itself."""
        ...

    def all_gather(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Every rank's tensor of this shape, in rank order."""
        ...


@dataclass(frozen=True, slots=True)
class OneRank:
    """A group of one: collectives are what they are given."""

    size: int = 1
    rank: int = 0

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (tensor,)


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's place."""

    tensor: RankGroup = OneRank()
    """Query and KV heads are divided evenly; every rank holds all rows and all tokens."""
    cfg: RankGroup = OneRank()
    """Each rank computes one CFG row; the number of rows equals the group's size."""
