# SPDX-License-Identifier: Apache-2.0
"""Deliveries whose rows encode request, position and key, so that a misplaced row shows."""

import zlib

import numpy as np
import pytest
import torch

from omni_core.prefix_cache.config import HIDDEN_KEY
from omni_core.sinks.base import RequestEnd, SinkDelivery, SinkRequestEnd


def row_values(req_id, key, positions, width=3, dtype=torch.float32):
    """`(len(positions), width)`: column 0 the position, 1 the request, 2 the key; small exact integers."""
    columns = [
        torch.tensor([float(p) for p in positions]),
        torch.full((len(positions),), float(zlib.crc32(req_id.encode("utf-8", "surrogatepass")) % 100)),
        torch.full((len(positions),), float(zlib.crc32(key.encode()) % 100)),
    ]
    return torch.stack(columns, dim=1)[:, :width].to(dtype)


def tokens(req_id, positions):
    return np.array([p * 7 + len(req_id) for p in positions], dtype=np.int64)


def delivery(req_id, *ranges, step_id=0, client=None, keys=(HIDDEN_KEY,), dtype=torch.float32, leftovers=None):
    positions = [p for start, stop in ranges for p in range(start, stop)]
    return SinkDelivery(
        req_id=req_id,
        client_req_id=client,
        step_id=step_id,
        ranges=tuple(ranges),
        rows={key: row_values(req_id, key, positions, dtype=dtype) for key in keys},
        token_ids=tokens(req_id, positions),
        leftovers=leftovers or {},
    )


def ended(req_id, end=RequestEnd.FINISHED, client=None, missing=(), error=None):
    return SinkRequestEnd(req_id=req_id, client_req_id=client, end=end, missing=tuple(missing), error=error)


def assert_rows_of(stored, req_id, positions, keys=(HIDDEN_KEY,), dtype=torch.float32):
    positions = list(positions)
    assert stored.req_id == req_id
    assert stored.positions.tolist() == positions
    assert stored.token_ids.tolist() == tokens(req_id, positions).tolist()
    assert set(stored.rows) == set(keys)
    for key in keys:
        expected = row_values(req_id, key, positions, dtype=dtype)
        assert stored.rows[key].dtype == dtype
        assert torch.equal(stored.rows[key], expected)


@pytest.fixture
def make():
    """The helpers above, for tests in this folder."""

    class Make:
        delivery = staticmethod(delivery)
        ended = staticmethod(ended)
        row_values = staticmethod(row_values)
        tokens = staticmethod(tokens)
        assert_rows_of = staticmethod(assert_rows_of)

    return Make
