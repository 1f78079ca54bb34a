# SPDX-License-Identifier: Apache-2.0
"""A row's attention in pieces that a kernel with one causal flag can compute.

    text      [s, e)   causal, keys [0, e): query i of n is aligned to the bottom right, so it sees keys up to its own
    span      [a, b)   not causal, keys [0, b); a hit may have cut its front off, its keys are in pages

Keys of all query tokens must be in place before the first piece is computed.
"""

from __future__ import annotations

from dataclasses import dataclass

from omni_core.diffusion_kv.errors import PagedAttentionError
from omni_core.diffusion_kv.rows import RowLayout


@dataclass(frozen=True, slots=True)
class AttentionPiece:
    """Queries `[query_start, query_end)` of a row over its keys `[0, key_end)`."""

    query_start: int
    query_end: int
    key_end: int
    causal: bool
    """Whether the last query sees every key, the one before it one key less, and so on."""

    @property
    def num_query_tokens(self) -> int:
        return self.query_end - self.query_start


@dataclass(frozen=True, slots=True)
class PiecePlan:
    """The pieces of `[query_start, query_end)`, in order and without a gap.

    Raises:
        PagedAttentionError: a gap, an empty piece, keys that end before their queries, a causal piece whose keys do not
            end with its queries, or a last piece that does not end with the plan.
    """

    query_start: int
    query_end: int
    pieces: tuple[AttentionPiece, ...]

    def __post_init__(self) -> None:
        position = self.query_start
        for piece in self.pieces:
            if piece.query_start != position or piece.query_end <= position:
                raise PagedAttentionError(
                    f"an attention piece [{piece.query_start}, {piece.query_end}) where position {position} is next; "
                    "pieces are not empty and leave no gap"
                )
            if piece.key_end < piece.query_end or (piece.causal and piece.key_end != piece.query_end):
                raise PagedAttentionError(
                    f"the {'causal' if piece.causal else 'bidirectional'} piece [{piece.query_start}, "
                    f"{piece.query_end}) has keys [0, {piece.key_end}); a causal piece's keys end with its queries, "
                    "a bidirectional one's not before them"
                )
            position = piece.query_end
        if position != self.query_end:
            raise PagedAttentionError(
                f"the last attention piece ends at {position} and the keys of this forward at {self.query_end}; its "
                "queries would be aligned to the wrong keys"
            )


def plan_pieces(layout: RowLayout, query_start: int, query_end: int) -> PiecePlan:
    """The pieces of `[query_start, query_end)` of a row. A start inside a span is fine, an end is not.

    Raises:
        PagedAttentionError: an empty or outlying range, or one that ends inside a span, whose later keys nobody has.
    """
    total = layout.geometry.total_tokens
    if not 0 <= query_start < query_end <= total:
        raise PagedAttentionError(
            f"query tokens [{query_start}, {query_end}) of a row of {total} tokens are none, or outside it"
        )
    pieces = []
    position = query_start
    for span in layout.spans:
        if span.end <= position:
            continue
        if span.start >= query_end:
            break
        if span.end > query_end:
            raise PagedAttentionError(
                f"query tokens [{query_start}, {query_end}) end inside the span [{span.start}, {span.end}), whose "
                "tokens see each other both ways"
            )
        if position < span.start:
            pieces.append(AttentionPiece(position, span.start, span.start, causal=True))
            position = span.start
        pieces.append(AttentionPiece(position, span.end, span.end, causal=False))
        position = span.end
    if position < query_end:
        pieces.append(AttentionPiece(position, query_end, query_end, causal=True))
    return PiecePlan(query_start, query_end, tuple(pieces))
