# SPDX-License-Identifier: Apache-2.0
"""Cuts a delivery whose keys cover different positions into pieces in which every key covers every position.

The cache may deliver one key for a request's whole prefix and another for the computed tokens only. A sink is given
rows per position, so it gets the prefix and the computed tokens one after the other, each with the keys that have rows
there.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from omni_core.prefix_cache.outputs import RequestRows, TokenRange


def pieces_of(rows: RequestRows) -> list[RequestRows]:
    """The delivery in pieces, ascending and disjoint; one piece if every key covers `rows.ranges`. Copies no row.

    Positions without any row are left out. Rows that only stand in for ones never stored (`zero_ranges`) are not handed
    on: to a sink they would look like the model's. Leftovers go with the last piece.
    """
    if not rows.zero_ranges and not any(covered != rows.ranges for covered in rows.key_ranges.values()):
        return [rows]
    every_range = [rows.ranges, *rows.key_ranges.values(), *rows.zero_ranges.values()]
    edges = sorted({edge for ranges in every_range for one in ranges for edge in one})
    cuts: list[tuple[TokenRange, dict[str, int]]] = []
    for start, stop in pairwise(edges):
        offsets = {
            key: _offset(rows.ranges_of(key), start)
            for key in rows.rows
            if _offset(rows.zero_ranges.get(key, ()), start) is None
        }
        present = {key: offset for key, offset in offsets.items() if offset is not None}
        if present:
            cuts.append(((start, stop), present))
    pieces = []
    for index, ((start, stop), present) in enumerate(cuts):
        parts = {key: rows.rows[key][offset : offset + stop - start] for key, offset in present.items()}
        leftovers = rows.leftovers if index == len(cuts) - 1 else {}
        pieces.append(RequestRows(rows.req_id, ((start, stop),), parts, leftovers=leftovers))
    return pieces


def before_position(piece: RequestRows, end: int) -> RequestRows:
    """A piece without its rows at `end` and behind. Copies no row."""
    ranges = tuple((start, min(stop, end)) for start, stop in piece.ranges if start < end)
    num_rows = sum(stop - start for start, stop in ranges)
    rows = {key: value[:num_rows] for key, value in piece.rows.items()} if ranges else {}
    return RequestRows(piece.req_id, ranges, rows, leftovers=piece.leftovers)


def _offset(ranges: Sequence[TokenRange], position: int) -> int | None:
    """Which row of a tensor over `ranges` belongs to `position`; `None` if it has none."""
    before = 0
    for start, stop in ranges:
        if start <= position < stop:
            return before + position - start
        before += stop - start
    return None
