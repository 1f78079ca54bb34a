# SPDX-License-Identifier: Apache-2.0
"""Which row of a batch is whose, and at which position: what every model runner knows, as arrays."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[Any]
"""Integers of any width."""


class BatchRows(NamedTuple):
    """A batch's rows, request after request, without padding."""

    starts: npt.NDArray[np.int64]
    """`(num_reqs + 1,)`: request `i` has rows `starts[i]` to `starts[i + 1]`. Not to be written to."""
    in_batch: npt.NDArray[np.int64]
    """`(num_rows,)`: the index of each row's request."""
    positions: npt.NDArray[np.int64]
    """`(num_rows,)`: the token position of each row."""


def batch_rows(num_scheduled: Integers, num_computed: Integers) -> BatchRows:
    """The rows of a batch. Pure.

    Args:
        num_scheduled: `(num_reqs,)` tokens that each request runs in the step, at least one.
        num_computed: `(num_reqs,)` the position where each run begins.
    """
    num_reqs = len(num_scheduled)
    if np.add.reduce(num_scheduled) == num_reqs:  # a decode step: one row each
        starts = _one_row_each(num_reqs)
        return BatchRows(starts, starts[:-1], num_computed.astype(np.int64))
    starts = np.zeros(num_reqs + 1, np.int64)
    np.cumsum(num_scheduled, out=starts[1:])
    in_batch = np.repeat(np.arange(num_reqs), num_scheduled)
    firsts = num_computed.astype(np.int64) - starts[:-1]
    return BatchRows(starts, in_batch, np.arange(starts[-1]) + firsts[in_batch])


@lru_cache(maxsize=8)
def _one_row_each(num_reqs: int) -> npt.NDArray[np.int64]:
    """The starts of a decode step: the same ones step after step, so they are made once."""
    starts = np.arange(num_reqs + 1, dtype=np.int64)
    starts.flags.writeable = False
    return starts
