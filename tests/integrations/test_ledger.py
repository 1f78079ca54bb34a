# SPDX-License-Identifier: Apache-2.0
"""One request's tokens, and which of its positions were promised and delivered."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_core.integrations.vllm.delivery.ledger import UNKNOWN_TOKEN_ID, RequestLedger
from omni_core.integrations.vllm.request_ids import ClientRequest


def ledger(prompt=(10, 11, 12, 13), skipped=0):
    return RequestLedger("a-00000000", ClientRequest("a", None), prompt, skipped)


def ran(one, first, *token_ids):
    one.note_run(np.arange(first, first + len(token_ids)), np.asarray(token_ids))


def test_the_tokens_of_a_hit_come_from_the_prompt_and_the_others_from_the_steps():
    one = ledger(skipped=3)
    ran(one, 3, 13)
    ran(one, 4, 20)
    assert one.token_ids([(0, 5)]).tolist() == [10, 11, 12, 13, 20]
    assert one.token_ids([(1, 2), (4, 5)]).tolist() == [11, 20]
    assert one.token_ids([]).tolist() == []


def test_a_prompt_given_as_embeddings_has_unknown_tokens():
    one = ledger(prompt=None, skipped=2)
    ran(one, 2, UNKNOWN_TOKEN_ID, 7)
    assert one.token_ids([(0, 4)]).tolist() == [UNKNOWN_TOKEN_ID] * 3 + [7]


def test_tokens_far_beyond_the_prompt_are_kept():
    one = ledger()
    for position in range(4, 600):
        ran(one, position, position * 3)
    assert one.token_ids([(4, 600)]).tolist() == [position * 3 for position in range(4, 600)]


def test_a_whole_request_misses_nothing():
    one = ledger(skipped=3)
    ran(one, 3, 13)
    one.note_fed([(0, 4)], with_hidden=True)
    assert one.missing(whole_prefix=True) == ()
    assert one.rows_fed == 4


def test_undelivered_positions_are_missing():
    one = ledger()
    ran(one, 0, 10, 11, 12, 13)
    ran(one, 4, 20)
    ran(one, 5, 21)
    one.note_fed([(0, 2)], with_hidden=True)
    one.note_fed([(4, 5)], with_hidden=True)
    assert one.missing(whole_prefix=True) == ((2, 4), (5, 6))


def test_a_position_of_which_only_another_key_came_is_missing_and_yet_a_row_of_it_was_fed():
    one = ledger()
    ran(one, 0, 10, 11, 12, 13)
    one.note_fed([(0, 3)], with_hidden=False)
    one.note_fed([(3, 4)], with_hidden=True)
    assert one.missing(whole_prefix=True) == ((0, 3),)
    assert one.rows_fed == 4


@pytest.mark.parametrize(("whole_prefix", "expected"), [(True, ((0, 4),)), (False, ((3, 4),))])
def test_skipped_tokens_are_owed_only_where_the_whole_prefix_is(whole_prefix, expected):
    one = ledger(skipped=3)
    ran(one, 3, 13)
    assert one.missing(whole_prefix=whole_prefix) == expected


def test_a_request_that_never_ran_misses_nothing():
    assert ledger(skipped=3).missing(whole_prefix=True) == ()


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5)), max_size=12), st.randoms())
def test_missing_is_what_was_computed_and_not_delivered_in_any_order(runs, random):
    one, at, delivered, missing = ledger(prompt=None), 0, [], set()
    for was_delivered, length in runs:
        ran(one, at, *range(length))
        span = (at, at + length)
        delivered += [span] if was_delivered else []
        missing |= set() if was_delivered else set(range(*span))
        at += length
    random.shuffle(delivered)
    for span in delivered:
        one.note_fed([span], with_hidden=True)
    reported = one.missing(whole_prefix=True)
    assert {position for start, stop in reported for position in range(start, stop)} == missing
    assert all(stop < start for (_, stop), (start, _) in pairwise(reported))
