# SPDX-License-Identifier: Apache-2.0
"""What the demo calls equal, and what it calls different: bit for bit in one run, row-relative across runs."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from omni_core.integrations.vllm.demo.compare import (
    cache_off_rows,
    check_against_tap,
    compare_with_cache_off,
    row_relative_difference,
)
from omni_core.integrations.vllm.tapped_request import prefix_digests
from omni_core.prefix_cache.config import HIDDEN_KEY
from omni_core.sinks.base import RequestEnd
from omni_core.sinks.rows import StoredRequest

PROMPT = [11, 12, 13, 14, 15]
GENERATED = [21, 22, 23]
FED = [*PROMPT, *GENERATED[:-1]]


class TokenTap:
    """A tap that knows rows by the whole token prefix, as a list of (prefix, key, row)."""

    def __init__(self):
        self.known = {}

    def learn(self, token_ids, rows, key=HIDDEN_KEY):
        for position, row in enumerate(rows):
            self.known.setdefault((tuple(token_ids[: position + 1]), key), []).append(row)

    def rows(self, digest, position, key=HIDDEN_KEY):
        return [
            row
            for (prefix, known_key), rows in self.known.items()
            if known_key == key and len(prefix) == position + 1 and prefix_digests(prefix)[-1] == digest
            for row in rows
        ]

    def equal_rows(self, token_ids, rows, key=HIDDEN_KEY, first_position=0):
        return np.array(
            [
                any(torch.equal(row, known) for known in self.known.get((tuple(token_ids[: position + 1]), key), []))
                for position, row in enumerate(rows, start=first_position)
            ],
            dtype=np.bool_,
        )


def computed_rows(count=7):
    return torch.arange(count * 4, dtype=torch.float32).reshape(count, 4) + 1


def stored(**changes):
    whole = StoredRequest(
        req_id="chat-01-81bdb22f",
        client_req_id="chat-01",
        end=RequestEnd.FINISHED,
        ranges=((0, len(FED)),),
        missing=(),
        rows={HIDDEN_KEY: computed_rows()},
        token_ids=np.array(FED, dtype=np.int64),
    )
    return replace(whole, **changes)


@pytest.fixture
def tap():
    tap = TokenTap()
    tap.learn(FED, computed_rows())
    return tap


def checked(request, tap, tmp_path):
    return check_against_tap("chat-01", tmp_path / "f", request, tap, PROMPT, GENERATED)


def test_a_whole_file_whose_rows_the_run_computed_is_right(tap, tmp_path):
    found = checked(stored(), tap, tmp_path)
    assert (found.rows, found.rows_equal_to_tap, found.problem) == (7, 7, None)
    assert found.file == str(tmp_path / "f")


def test_one_bit_of_one_row_shows(tap, tmp_path):
    rows = computed_rows()
    rows[3, 2] = torch.nextafter(rows[3, 2], torch.tensor(0.0))
    found = checked(stored(rows={HIDDEN_KEY: rows}), tap, tmp_path)
    assert (found.rows, found.rows_equal_to_tap) == (7, 6)


def test_rows_at_each_others_positions_show(tap, tmp_path):
    found = checked(stored(rows={HIDDEN_KEY: computed_rows()[[0, 2, 1, 3, 4, 5, 6]]}), tap, tmp_path)
    assert found.rows_equal_to_tap == 5


def test_a_wrong_row_of_a_further_key_shows(tap, tmp_path):
    tap.learn(FED, computed_rows() * 2, key="codes")
    codes = computed_rows() * 2
    codes[6] = 0
    found = checked(stored(rows={HIDDEN_KEY: computed_rows(), "codes": codes}), tap, tmp_path)
    assert (found.rows, found.rows_equal_to_tap) == (7, 6)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"missing": ((7, 8),)}, "not of a whole request"),
        ({"end": RequestEnd.ABORTED}, "not of a whole request: end aborted"),
        ({"ranges": ((1, 8),)}, "covers positions [(1, 8)], not [0, 7)"),
        ({"ranges": ((0, 6),), "rows": {HIDDEN_KEY: computed_rows(6)}}, "covers positions [(0, 6)], not [0, 7)"),
        ({"rows": {}}, "no hidden rows"),
        ({"key_ranges": {HIDDEN_KEY: ((0, 6),)}}, "covers positions [(0, 6)] only"),
        ({"token_ids": np.array([*FED[:-1], 99], dtype=np.int64)}, "token ids are not"),
    ],
)
def test_a_file_that_is_not_the_whole_request_says_why(tap, tmp_path, changes, why):
    assert why in checked(stored(**changes), tap, tmp_path).problem


def test_an_empty_file_has_no_equal_rows(tap, tmp_path):
    empty = stored(ranges=(), rows={}, token_ids=np.empty(0, dtype=np.int64))
    found = checked(empty, tap, tmp_path)
    assert (found.rows, found.rows_equal_to_tap) == (0, 0)
    assert found.problem is not None


@pytest.mark.parametrize(
    ("row", "reference", "difference"),
    [
        ([1.0, 2.0, -4.0], [1.0, 2.0, -4.0], 0.0),
        ([1.0, 2.0, -4.0], [1.0, 2.0, -4.5], 0.5 / 4.5),
        ([1.0, 0.0], [0.0, 0.0], math.inf),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([math.nan, 1.0], [1.0, 1.0], math.inf),
        ([math.nan, 1.0], [math.nan, 1.0], math.inf),
        ([math.inf, 1.0], [1.0, 1.0], math.inf),
        ([1.0], [1.0, 1.0], math.inf),
    ],
)
def test_row_relative_difference(row, reference, difference):
    assert row_relative_difference(torch.tensor(row), torch.tensor(reference)) == difference


def test_a_bfloat16_difference_is_not_rounded_away():
    row, reference = torch.tensor([256.0, 1.0]).bfloat16(), torch.tensor([256.0, 1.0078125]).bfloat16()
    assert row_relative_difference(row, reference) == 0.0078125 / 256


def test_the_largest_difference_of_a_prompt_and_its_control():
    delivered = torch.ones(7, 4)
    reference = [[torch.ones(4)] for _ in PROMPT]
    reference[3] = [torch.ones(4), torch.full((4,), 1.25)]
    again = [list(rows) for rows in reference]
    again[1] = [*again[1], torch.full((4,), 1.5)]
    found = compare_with_cache_off("chat-01", delivered, reference, again)
    assert (found.largest_difference, found.at_position) == (0.2, 3)
    assert found.control_difference == 0.5
    assert found.problem is None
    assert compare_with_cache_off("chat-01", delivered, reference, None) == replace(found, control_difference=None)


def test_a_prompt_row_that_cannot_be_compared_is_a_problem():
    reference = [[torch.ones(4)] for _ in PROMPT]
    nowhere = [*reference[:2], [], *reference[3:]]
    assert "positions [2]" in compare_with_cache_off("a", torch.ones(7, 4), nowhere, nowhere).problem
    assert "4 rows delivered for 5" in compare_with_cache_off("a", torch.ones(4, 4), reference, reference).problem
    delivered = torch.ones(7, 4)
    delivered[4, 0] = math.nan
    assert "position 4" in compare_with_cache_off("a", delivered, reference, reference).problem


def test_cache_off_rows_are_found_by_the_whole_prefix(tap):
    other = TokenTap()
    other.learn([99, *PROMPT[1:]], computed_rows(5))
    assert [len(rows) for rows in cache_off_rows(other, PROMPT)] == [0] * 5
    found = cache_off_rows(tap, PROMPT)
    assert torch.equal(torch.stack([rows[0] for rows in found]), computed_rows(5))
