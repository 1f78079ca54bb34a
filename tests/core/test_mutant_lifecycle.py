# SPDX-License-Identifier: Apache-2.0
"""Which rows draft counts clip, and what is left of a content that was replaced."""

import pytest
from cache_rig import more, new, replaced
from row_values import assert_rows

from omni_core.prefix_cache.config import Delivery


def test_beside_a_request_with_drafts_a_count_for_one_without_means_nothing(rig):
    rig.run(new("A", [1, 2], run=4), new("B", [5, 6], run=4))
    taken = rig.run(more("A", 3, drafts=2), more("B", 2), counts={"A": 1, "B": 0})
    assert_rows(taken["A"], ("A", 4, 5))
    assert_rows(taken["B"], ("B", 4, 6))


@pytest.mark.parametrize("sampled", [1, 2, 3])
def test_rows_in_front_of_the_drafts_are_delivered_however_few_were_sampled(rig, sampled):
    rig.run(new("A", [1, 2, 3], run=2))
    # Three rows of known tokens, then the one that sampling begins at, then two of drafts.
    taken = rig.run(more("A", 6, drafts=2), counts={"A": sampled})
    assert_rows(taken["A"], ("A", 2, 5 + sampled))


def test_rows_missing_when_a_content_is_replaced_are_neither_owed_nor_reported(rig):
    rig.cache.discard_step(rig.step(new("A", [1, 2], run=6)))
    assert_rows(rig.run(replaced("A", [5], run=3, content="A2"))["A"], ("A2", 0, 3))
    assert rig.cache.take_partial_requests() == ()
    rig.begin(finish=["A"])
    assert rig.cache.take_partial_requests() == ()


@pytest.mark.parametrize("ended", [False, True], ids=["live", "ended"])
def test_rows_of_a_replaced_content_that_come_back_unacknowledged_are_dropped(make_rig, ended):
    rig = make_rig(delivery=Delivery.TWO_PHASE)
    old = rig.run(new("A", [1, 2], run=6))
    rig.run(replaced("A", [5, 6], run=3, content="A2")).acknowledge()
    if ended:
        rig.begin(finish=["A"])
    old.release()
    assert rig.cache.take_partial_requests() == ()
    if not ended:
        assert_rows(rig.run(more("A", 2))["A"], ("A2", 3, 5))
