# SPDX-License-Identifier: Apache-2.0
"""Rows of a step in which every request gets what it computed and nothing else: a tensor per key, shared out late."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from omni_core.prefix_cache.outputs import RequestRows, TokenRange

NOTHING: Mapping[str, Any] = MappingProxyType({})


class PlainRows(Mapping[str, RequestRows]):
    """Request id → rows. What describes a request is made when the first request is looked at.

    Any thread may read. Two that look first at the same moment both make it, equal.
    """

    __slots__ = ("_columns", "_positions", "_req_ids", "_rows", "_starts")

    def __init__(
        self,
        req_ids: tuple[str, ...],
        starts: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        columns: Mapping[str, torch.Tensor],
    ) -> None:
        """Keep the batch.

        Args:
            req_ids: requests in batch order.
            starts: `(num_reqs + 1,)`: request `i` has rows `starts[i]` to `starts[i + 1]`.
            positions: `(num_tokens,)`: the token position of each row.
            columns: key → CPU tensor `(num_tokens, *trailing)`.
        """
        self._req_ids = req_ids
        self._starts = starts
        self._positions = positions
        self._columns = columns
        self._rows: dict[str, RequestRows] | None = None

    def __getitem__(self, req_id: str) -> RequestRows:
        return self._shared_out()[req_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._req_ids)

    def __len__(self) -> int:
        return len(self._req_ids)

    def _shared_out(self) -> dict[str, RequestRows]:
        if self._rows is None:
            firsts = self._positions[self._starts[:-1]].tolist()
            lengths = np.diff(self._starts).tolist()
            views = [column.split_with_sizes(lengths) for column in self._columns.values()]
            ranges: list[tuple[TokenRange, ...]] = [
                ((first, first + length),) for first, length in zip(firsts, lengths, strict=True)
            ]
            keys = tuple(self._columns)
            self._rows = {
                req_id: RequestRows(req_id, covered, dict(zip(keys, parts, strict=True)), NOTHING, NOTHING, NOTHING)
                for req_id, covered, *parts in zip(self._req_ids, ranges, *views, strict=True)
            }
        return self._rows
