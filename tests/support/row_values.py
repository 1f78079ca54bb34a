# SPDX-License-Identifier: Apache-2.0
"""Rows whose value says which request, position and key they belong to, so that a misplaced row shows."""

import math
import zlib

import torch

from omni_core.prefix_cache.config import HIDDEN_KEY


def request_code(req_id):
    """1-26 for `A`-`Z`, 30 + n for `r<n>`: exact in every dtype used here."""
    if len(req_id) == 1:
        return ord(req_id) - ord("A") + 1
    return 30 + int(req_id[1:])


def key_code(key):
    return zlib.crc32(key.encode()) % 59 + 1


def row_values(req_id, positions, key=HIDDEN_KEY, trailing=(3,), dtype=torch.float32):
    """`(len(positions), *trailing)`: what request `req_id` computes at these positions for `key`."""
    at = torch.tensor(list(positions), dtype=torch.int64)
    width = math.prod(trailing)
    request, output = request_code(req_id), key_code(key)
    if width >= 3:
        codes = torch.stack([at % 128, torch.full_like(at, request), torch.full_like(at, output)], dim=1)
        column = torch.arange(width)
        values = codes[:, column % 3] + column % 41
    else:
        values = torch.stack([at + 1_000 * request + 250_000 * output, -at - 1][:width], dim=1)
    return values.to(dtype).reshape(len(at), *trailing)


def merged_ranges(pieces):
    """`(req, start, stop)` pieces as the fewest `(start, stop)` ranges."""
    ranges = []
    for _, start, stop in pieces:
        if ranges and ranges[-1][1] == start:
            ranges[-1] = (ranges[-1][0], stop)
        else:
            ranges.append((start, stop))
    return tuple(ranges)


def assert_rows(rows, *pieces, key=HIDDEN_KEY, trailing=(3,), dtype=torch.float32):
    """`rows` (a `RequestRows`) holds for `key` exactly these pieces: `(who computed it, start, stop)`, in order."""
    assert rows.ranges_of(key) == merged_ranges(pieces)
    expected = torch.cat(
        [
            torch.zeros((0, *trailing), dtype=dtype),
            *(row_values(req_id, range(first, last), key, trailing, dtype) for req_id, first, last in pieces),
        ]
    )
    found = rows[key]
    assert found.dtype == dtype
    assert found.shape == expected.shape
    assert torch.equal(found, expected), f"key {key!r}: expected\n{expected}\nfound\n{found}"
