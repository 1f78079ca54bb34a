# SPDX-License-Identifier: Apache-2.0
"""How many bytes rows take: what every bound of a queue or a sink counts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from omni_core.sinks.base import SinkDelivery

ENTRY_BYTES = 1024
"""What a delivery costs beside its rows, and each tensor, too. A row of a decode step is often smaller than that."""


def delivery_nbytes(delivery: SinkDelivery) -> int:
    """Bytes of a delivery: rows, token ids, leftovers, and `ENTRY_BYTES` for itself and for each key of each range."""
    num_entries = 1 + len(delivery.rows) * len(delivery.ranges)
    return (
        num_entries * ENTRY_BYTES
        + rows_nbytes(delivery.rows)
        + int(delivery.token_ids.nbytes)
        + leftover_nbytes(delivery.leftovers)
    )


def held_nbytes(deliveries: Iterable[SinkDelivery]) -> int:
    """Bytes that deliveries keep alive while they wait: as `delivery_nbytes`, but whole buffers instead of rows.

    The rows of a step are pieces of one buffer per key, which is larger than they are and stays as long as one of them.
    """
    buffers: dict[int, int] = {}
    nbytes = 0
    for delivery in deliveries:
        nbytes += delivery_nbytes(delivery) - rows_nbytes(delivery.rows)
        for tensor in delivery.rows.values():
            storage = tensor.untyped_storage()
            buffers[storage.data_ptr()] = storage.nbytes()
    return nbytes + sum(buffers.values())


def rows_nbytes(rows: Mapping[str, torch.Tensor]) -> int:
    """Bytes of every row of every key."""
    return sum(tensor.nbytes for tensor in rows.values())


def leftover_nbytes(value: Any) -> int:
    """Bytes of every tensor and array in nested mappings, lists and tuples, and `ENTRY_BYTES` for each; texts, too.

    Other objects count as nothing.
    """
    if isinstance(value, torch.Tensor | np.ndarray):
        return ENTRY_BYTES + int(value.nbytes)
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(leftover_nbytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(leftover_nbytes, value))
    return 0
