# SPDX-License-Identifier: Apache-2.0
"""What is refused of a row and of its identity, whoever makes it."""

import pytest

from omni_core.diffusion_kv.errors import RowError
from omni_core.diffusion_kv.rows import BidirectionalSpan, ImageFeature, RowGeometry, RowIdentity, RowLayout

GEOMETRY = RowGeometry(prefix_tokens=70, target_tokens=40, total_tokens=113)
TOKENS = tuple(range(113))


@pytest.mark.parametrize(
    ("lengths", "says"),
    [
        ((-1, 40, 113), "prefix_tokens=-1 is negative"),
        ((70, 0, 113), "target_tokens=0; a row generates at least one token"),
        ((0, 0, 0), "target_tokens=0"),
        ((70, -1, 113), "target_tokens=-1"),
        ((70, 44, 113), "prefix_tokens=70 and target_tokens=44 are more than total_tokens=113"),
        ((0, 1, -1), "more than total_tokens=-1"),
        ((70.0, 40, 113), "prefix_tokens=70.0 is a float"),
        ((70, True, 113), "target_tokens=True is a bool"),
        ((70, 40, "113"), "total_tokens='113' is a str"),
    ],
)
def test_lengths_that_make_no_row(lengths, says):
    with pytest.raises(RowError, match=says):
        RowGeometry(*lengths)


@pytest.mark.parametrize(("lengths", "trailer"), [((0, 1, 1), 0), ((70, 43, 113), 0), ((70, 40, 113), 3)])
def test_a_row_needs_neither_prefix_nor_trailer(lengths, trailer):
    assert RowGeometry(*lengths).trailer_tokens == trailer


@pytest.mark.parametrize(
    ("spans", "says"),
    [
        ([(20, 20)], r"span \[20, 20\) is empty or outside the row of 113"),
        ([(-1, 4)], r"span \[-1, 4\) is empty or outside"),
        ([(111, 114)], r"span \[111, 114\) is empty or outside"),
        ([(60, 71)], r"span \[60, 71\) crosses the end of the prefix at 70"),
        ([(100, 111)], r"span \[100, 111\) crosses the end of the target at 110"),
        ([(20, 58), (57, 60)], r"spans \[20, 58\) and \[57, 60\) overlap or are not sorted"),
        ([(30, 40), (20, 25)], "overlap or are not sorted"),
    ],
)
def test_spans_that_make_no_layout(spans, says):
    with pytest.raises(RowError, match=says):
        RowLayout(GEOMETRY, tuple(BidirectionalSpan(*span) for span in spans))


def test_spans_may_touch_each_other_and_the_edges():
    spans = tuple(BidirectionalSpan(*span) for span in [(0, 20), (20, 70), (70, 110), (110, 113)])
    assert RowLayout(GEOMETRY, spans).spans == spans


@pytest.mark.parametrize(
    ("token_ids", "features", "namespace", "says"),
    [
        (TOKENS, [], b"", "the namespace is empty"),
        ((1, 2.0), [], b"tiny", "token id 2.0 at 1 is a float, not a plain int"),
        ((True, 2), [], b"tiny", "token id True at 0 is a bool"),
        (TOKENS, [("", 20, 58)], b"tiny", r"the image feature at \[20, 58\) has no identifier"),
        (TOKENS, [("fox", 20, 20)], b"tiny", r"image feature 'fox' spans \[20, 20\)"),
        (TOKENS, [("fox", 58, 20)], b"tiny", r"image feature 'fox' spans \[58, 20\)"),
        (TOKENS, [("fox", -1, 20)], b"tiny", r"image feature 'fox' spans \[-1, 20\)"),
        (TOKENS, [("fox", 20, 58), ("hen", 57, 60)], b"tiny", r"\[20, 58\) and \[57, 60\) overlap or are not sorted"),
        (TOKENS, [("fox", 20, 58), ("hen", 30, 40)], b"tiny", "overlap"),
        (TOKENS, [("fox", 30, 40), ("hen", 20, 25)], b"tiny", "not sorted"),
    ],
)
def test_what_identifies_no_row(token_ids, features, namespace, says):
    with pytest.raises(RowError, match=says):
        RowIdentity(token_ids, tuple(ImageFeature(*feature) for feature in features), namespace)


def test_an_identity_that_is_not_this_rows():
    identity = RowIdentity(TOKENS[:69], (), b"tiny")
    with pytest.raises(RowError, match="69 token ids identify a prefix of 70 tokens"):
        identity.check_against(GEOMETRY)
    beyond = RowIdentity(TOKENS, (ImageFeature("fox", 60, 114),), b"tiny")
    with pytest.raises(RowError, match=r"image feature \[60, 114\) ends beyond the row of 113"):
        beyond.check_against(GEOMETRY)
    RowIdentity(TOKENS[:70], (ImageFeature("fox", 60, 113),), b"tiny").check_against(GEOMETRY)
