# SPDX-License-Identifier: Apache-2.0
"""A delivery whose keys cover different positions reaches a sink in pieces that each cover theirs."""

import torch

from omni_core.integrations.vllm.delivery.pieces import pieces_of
from omni_core.prefix_cache.outputs import RequestRows


def rows_at(*positions):
    return torch.tensor([[float(position)] for position in positions])


def seen(pieces):
    return [(piece.ranges, {key: rows.flatten().tolist() for key, rows in piece.rows.items()}) for piece in pieces]


def test_a_delivery_whose_keys_all_cover_it_stays_one_piece():
    rows = RequestRows("a", ((0, 3),), {"h": rows_at(0, 1, 2)}, {"h": ((0, 3),)}, leftovers={"note": 1})
    assert pieces_of(rows) == [rows]


def test_a_key_of_the_computed_tokens_only_comes_with_those():
    rows = RequestRows(
        "a", ((0, 4),), {"h": rows_at(3), "codes": rows_at(0, 1, 2, 3)}, {"h": ((3, 4),)}, leftovers={"note": 1}
    )
    pieces = pieces_of(rows)
    assert seen(pieces) == [
        (((0, 3),), {"codes": [0.0, 1.0, 2.0]}),
        (((3, 4),), {"h": [3.0], "codes": [3.0]}),
    ]
    assert [dict(piece.leftovers) for piece in pieces] == [{}, {"note": 1}]


def test_positions_without_any_row_are_left_out():
    rows = RequestRows("a", ((0, 4),), {"h": rows_at(3)}, {"h": ((3, 4),)})
    assert seen(pieces_of(rows)) == [(((3, 4),), {"h": [3.0]})]


def test_ranges_with_gaps_keep_their_gaps():
    rows = RequestRows("a", ((0, 2), (5, 7)), {"h": rows_at(6), "codes": rows_at(0, 1, 5, 6)}, {"h": ((6, 7),)})
    assert seen(pieces_of(rows)) == [
        (((0, 2),), {"codes": [0.0, 1.0]}),
        (((5, 6),), {"codes": [5.0]}),
        (((6, 7),), {"h": [6.0], "codes": [6.0]}),
    ]


def test_zeros_that_stand_in_for_rows_never_stored_are_not_handed_on():
    rows = RequestRows(
        "a",
        ((0, 4),),
        {"h": rows_at(0, 1, 2, 3), "codes": torch.tensor([[10.0], [0.0], [0.0], [13.0]])},
        zero_ranges={"codes": ((1, 3),)},
    )
    assert seen(pieces_of(rows)) == [
        (((0, 1),), {"h": [0.0], "codes": [10.0]}),
        (((1, 3),), {"h": [1.0, 2.0]}),
        (((3, 4),), {"h": [3.0], "codes": [13.0]}),
    ]
