# SPDX-License-Identifier: Apache-2.0
"""The pieces and the mask let each query see exactly the keys its row's layout says, wherever a hit begins."""

import pytest
import torch
from diffusion_kv.worker_rig import HIT, LAYOUT, MID_SPAN_HIT, brute_force
from hypothesis import given
from hypothesis import strategies as st

from omni_core.diffusion_kv.attention.masked import layout_mask
from omni_core.diffusion_kv.attention.pieces import AttentionPiece, PiecePlan, plan_pieces
from omni_core.diffusion_kv.errors import PagedAttentionError
from omni_core.diffusion_kv.rows import BidirectionalSpan, RowGeometry, RowLayout

GEOMETRY = LAYOUT.geometry


@st.composite
def layouts(draw):
    """A row with up to three reference spans in its prefix, one in its target, and up to one in its trailer."""
    parts = [(draw(st.integers(0, 5)), draw(st.integers(1, 6))) for _ in range(draw(st.integers(0, 3)))]
    spans, position = [], 0
    for text, image in parts:
        spans.append(BidirectionalSpan(position + text, position + text + image))
        position += text + image
    prefix = position + draw(st.integers(0, 5))
    timesteps, image = draw(st.integers(0, 2)), draw(st.integers(1, 7))
    target = timesteps + image
    spans.append(BidirectionalSpan(prefix + timesteps, prefix + target))
    total = prefix + target + draw(st.integers(0, 3))
    return RowLayout(RowGeometry(prefix, target, total), tuple(spans))


def seen_by(plan):
    """Which keys the queries of a plan see, read as a kernel reads it: bottom-right aligned where causal."""
    rows = []
    for piece in plan.pieces:
        for query in range(piece.num_query_tokens):
            last = piece.key_end - piece.num_query_tokens + query if piece.causal else piece.key_end - 1
            rows.append([key <= last for key in range(plan.query_end)])
    return rows


@given(layout=layouts(), data=st.data())
def test_a_first_step_sees_what_the_layout_says_from_any_hit_on(layout, data):
    geometry = layout.geometry
    hit = data.draw(st.integers(0, geometry.prefix_tokens))
    wanted = brute_force(layout, hit, geometry.total_tokens)
    assert seen_by(plan_pieces(layout, hit, geometry.total_tokens)) == wanted
    assert layout_mask(layout, hit, geometry.total_tokens, torch.device("cpu")).tolist() == wanted


@given(layout=layouts())
def test_a_later_step_sees_the_prefix_and_the_target_and_no_trailer(layout):
    geometry = layout.geometry
    wanted = brute_force(layout, geometry.prefix_tokens, geometry.target_end)
    assert seen_by(plan_pieces(layout, geometry.prefix_tokens, geometry.target_end)) == wanted
    assert layout_mask(layout, geometry.prefix_tokens, geometry.target_end, torch.device("cpu")).tolist() == wanted


def test_text_is_causal_and_a_span_sees_itself_whole():
    assert plan_pieces(LAYOUT, 0, GEOMETRY.total_tokens).pieces == (
        AttentionPiece(0, 20, 20, causal=True),
        AttentionPiece(20, 58, 58, causal=False),
        AttentionPiece(58, 71, 71, causal=True),
        AttentionPiece(71, 110, 110, causal=False),
        AttentionPiece(110, 113, 113, causal=True),
    )


def test_a_hit_inside_a_span_leaves_its_rest_not_causal():
    assert plan_pieces(LAYOUT, MID_SPAN_HIT, GEOMETRY.total_tokens).pieces[0] == AttentionPiece(
        48, 58, 58, causal=False
    )


def test_a_hit_in_text_begins_with_the_rest_of_the_text():
    assert plan_pieces(LAYOUT, HIT, GEOMETRY.total_tokens).pieces[0] == AttentionPiece(64, 71, 71, causal=True)


@pytest.mark.parametrize(("start", "end"), [(-1, 113), (5, 5), (6, 5), (0, 114)])
def test_a_range_of_no_tokens_or_outside_the_row_is_refused(start, end):
    with pytest.raises(PagedAttentionError, match="are none, or outside it"):
        plan_pieces(LAYOUT, start, end)


def test_a_range_that_ends_inside_a_span_is_refused():
    with pytest.raises(PagedAttentionError, match=r"\[0, 57\) end inside the span \[20, 58\)"):
        plan_pieces(LAYOUT, 0, 57)


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ((AttentionPiece(0, 4, 4, causal=True),), "the last attention piece ends at 4 and the keys .* at 10"),
        ((AttentionPiece(0, 4, 4, causal=True), AttentionPiece(5, 10, 10, causal=True)), "where position 4 is next"),
        ((AttentionPiece(0, 0, 0, causal=True), AttentionPiece(0, 10, 10, causal=True)), "are not empty"),
        ((AttentionPiece(0, 10, 11, causal=True),), r"the causal piece \[0, 10\) has keys \[0, 11\)"),
        ((AttentionPiece(0, 10, 9, causal=False),), r"the bidirectional piece \[0, 10\) has keys \[0, 9\)"),
    ],
)
def test_a_plan_a_kernel_would_read_wrongly_is_refused(pieces, message):
    with pytest.raises(PagedAttentionError, match=message):
        PiecePlan(0, 10, pieces)
