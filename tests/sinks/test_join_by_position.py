# SPDX-License-Identifier: Apache-2.0
"""Deliveries come in any order; a request's rows come out by position, once each, or an error says why not."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omni_core.prefix_cache.config import HIDDEN_KEY
from omni_core.sinks.base import RequestEnd, SinkDelivery, SinkRequestEnd
from omni_core.sinks.errors import (
    DuplicateRowsError,
    RequestEndedError,
    RowsGapError,
    RowsMismatchError,
    SinkClosedError,
    UnknownRequestError,
)
from omni_core.sinks.memory import MemorySink
from omni_core.sinks.safetensors_files import SafetensorsSink, read_request_file, request_files


class InMemory:
    def __init__(self, folder):
        self.sink = MemorySink()

    def read(self, req_id):
        return self.sink.request(req_id)


class InFiles:
    def __init__(self, folder):
        self.sink = SafetensorsSink(folder)

    def read(self, req_id):
        found = [r for r in map(read_request_file, request_files(self.sink.directory)) if r.req_id == req_id]
        if not found:
            raise UnknownRequestError(req_id)
        return found[0]


@pytest.fixture(params=[InMemory, InFiles])
def kept(request, tmp_path):
    return request.param(tmp_path / "rows")


@st.composite
def shuffled_deliveries(draw):
    """Cuts of [0, n) dealt to deliveries of one or more ranges, in any order of arrival."""
    cuts = sorted(draw(st.sets(st.integers(1, 39), max_size=12)))
    edges = [0, *cuts, 40]
    ranges = list(pairwise(edges))
    order = draw(st.permutations(ranges))
    groups, at = [], 0
    while at < len(order):
        size = draw(st.integers(1, 3))
        groups.append(tuple(sorted(order[at : at + size])))
        at += size
    return groups


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=shuffled_deliveries(), second=shuffled_deliveries())
def test_rows_come_out_by_position_whatever_the_order_of_arrival(first, second, make):
    sink = MemorySink()
    for step, pair in enumerate(zip(first, second, strict=False)):
        for req_id, ranges in zip(("a", "b"), pair, strict=True):
            sink.accept(make.delivery(req_id, *ranges, step_id=step, keys=(HIDDEN_KEY, "codes.audio")))
    shorter = min(len(first), len(second))
    for req_id, groups in (("a", first), ("b", second)):
        for ranges in groups[shorter:]:
            sink.accept(make.delivery(req_id, *ranges, keys=(HIDDEN_KEY, "codes.audio")))
        sink.finish(make.ended(req_id))
    for req_id in ("a", "b"):
        stored = sink.request(req_id)
        assert stored.ranges == ((0, 40),)
        make.assert_rows_of(stored, req_id, range(40), keys=(HIDDEN_KEY, "codes.audio"))


def test_prefill_then_decode_steps_are_one_request(kept, make):
    kept.sink.accept(make.delivery("r", (0, 165), step_id=1))
    for position in range(165, 172):
        kept.sink.accept(make.delivery("r", (position, position + 1), step_id=position))
    kept.sink.finish(make.ended("r"))
    stored = kept.read("r")
    assert stored.complete
    make.assert_rows_of(stored, "r", range(172))
    assert torch.equal(stored.hidden_states, stored.rows[HIDDEN_KEY])


def test_rows_are_copied_before_accept_returns(kept, make):
    given_rows = make.delivery("r", (0, 4))
    kept.sink.accept(given_rows)
    given_rows.rows[HIDDEN_KEY].fill_(-1)
    given_rows.token_ids[:] = -1
    kept.sink.finish(make.ended("r"))
    make.assert_rows_of(kept.read("r"), "r", range(4))


def test_rows_that_lie_apart_in_memory_are_kept_by_value(kept):
    wide = torch.arange(24.0).reshape(4, 6)
    kept.sink.accept(SinkDelivery("r", None, 0, ((0, 4),), {HIDDEN_KEY: wide[:, ::2]}, np.arange(4, dtype=np.int64)))
    kept.sink.finish(SinkRequestEnd("r", None, RequestEnd.FINISHED))
    assert torch.equal(kept.read("r").hidden_states, wide[:, ::2])


@pytest.mark.parametrize("again", [(0, 1), (3, 5), (7, 9), (0, 20), (2, 3)])
def test_a_position_that_comes_twice_is_an_error_and_nothing_is_kept(kept, make, again):
    kept.sink.accept(make.delivery("r", (0, 8), step_id=1))
    with pytest.raises(DuplicateRowsError, match=r"request 'r', step 2: positions \["):
        kept.sink.accept(make.delivery("r", again, step_id=2))
    with pytest.raises(RequestEndedError, match="'r'"):
        kept.sink.accept(make.delivery("r", (20, 21), step_id=3))
    with pytest.raises(UnknownRequestError):
        kept.read("r")


def test_a_duplicate_of_one_request_leaves_the_others_whole(kept, make):
    kept.sink.accept(make.delivery("good", (0, 8)))
    kept.sink.accept(make.delivery("bad", (0, 8)))
    with pytest.raises(DuplicateRowsError):
        kept.sink.accept(make.delivery("bad", (7, 8)))
    kept.sink.finish(make.ended("good"))
    make.assert_rows_of(kept.read("good"), "good", range(8))


def test_a_hole_nobody_declared_is_an_error(kept, make):
    kept.sink.accept(make.delivery("r", (0, 4)))
    kept.sink.accept(make.delivery("r", (6, 8)))
    with pytest.raises(RowsGapError, match=r"positions \[4, 6\)"):
        kept.sink.finish(make.ended("r"))
    with pytest.raises(UnknownRequestError):
        kept.read("r")


def test_a_declared_hole_is_a_partial_request_with_its_ranges(kept, make):
    kept.sink.accept(make.delivery("r", (0, 4)))
    kept.sink.accept(make.delivery("r", (6, 8)))
    kept.sink.finish(make.ended("r", missing=[(4, 6)]))
    stored = kept.read("r")
    assert not stored.complete
    assert stored.missing == ((4, 6),)
    assert stored.ranges == ((0, 4), (6, 8))
    make.assert_rows_of(stored, "r", [0, 1, 2, 3, 6, 7])


def test_a_request_of_which_nothing_was_delivered_is_partial(kept, make):
    kept.sink.finish(make.ended("r", missing=[(0, 12)]))
    stored = kept.read("r")
    assert (stored.num_rows, stored.missing, stored.complete) == (0, ((0, 12),), False)


def test_a_position_both_delivered_and_missing_is_an_error(kept, make):
    kept.sink.accept(make.delivery("r", (0, 8)))
    with pytest.raises(RowsMismatchError, match=r"\[6, 8\)"):
        kept.sink.finish(make.ended("r", missing=[(6, 8)]))


def test_where_hidden_rows_are_missing_those_of_another_key_are_kept(kept, make):
    kept.sink.accept(make.delivery("r", (0, 6)))
    kept.sink.accept(make.delivery("r", (6, 10), keys=("codes",)))
    kept.sink.accept(make.delivery("r", (10, 11)))
    kept.sink.finish(make.ended("r", missing=[(6, 10)]))
    stored = kept.read("r")
    assert (stored.ranges, stored.missing, stored.complete) == (((0, 11),), ((6, 10),), False)
    assert stored.ranges_of(HIDDEN_KEY) == ((0, 6), (10, 11))
    assert torch.equal(stored.rows["codes"], make.row_values("r", "codes", range(6, 10)))


def test_a_gap_behind_a_position_that_is_missing_is_still_seen(kept, make):
    kept.sink.accept(make.delivery("r", (0, 6), keys=("codes",)))
    kept.sink.accept(make.delivery("r", (8, 9)))
    with pytest.raises(RowsGapError, match=r"\[6, 8\)"):
        kept.sink.finish(make.ended("r", missing=[(1, 3)]))


def test_a_tail_only_stage_keeps_its_absolute_range(kept, make):
    kept.sink.accept(make.delivery("r", (8, 12)))
    kept.sink.finish(make.ended("r"))
    assert kept.read("r").ranges == ((8, 12),)


def test_a_key_that_comes_with_some_steps_only_has_its_own_ranges(kept, make):
    kept.sink.accept(make.delivery("r", (0, 4), keys=(HIDDEN_KEY, "codes")))
    kept.sink.accept(make.delivery("r", (4, 6)))
    kept.sink.accept(make.delivery("r", (6, 7), keys=(HIDDEN_KEY, "codes")))
    kept.sink.finish(make.ended("r"))
    stored = kept.read("r")
    assert stored.ranges_of(HIDDEN_KEY) == ((0, 7),)
    assert stored.ranges_of("codes") == ((0, 4), (6, 7))
    assert torch.equal(stored.rows["codes"], make.row_values("r", "codes", [0, 1, 2, 3, 6]))


@pytest.mark.parametrize(
    "rows",
    [torch.zeros(2, 4), torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2, 3, 1), torch.zeros(2)],
    ids=["width", "dtype", "rank", "no width"],
)
def test_a_key_that_changes_its_shape_is_an_error(kept, make, rows):
    kept.sink.accept(make.delivery("r", (0, 2)))
    changed = SinkDelivery("r", None, 5, ((2, 4),), {HIDDEN_KEY: rows}, np.arange(2, dtype=np.int64))
    with pytest.raises(RowsMismatchError, match=r"request 'r', step 5: key '__hidden_states__' came as"):
        kept.sink.accept(changed)


@pytest.mark.parametrize(
    ("ranges", "num_rows", "num_tokens", "names"),
    [
        (((0, 3),), 2, 3, "key '__hidden_states__'"),
        (((0, 3),), 3, 2, "token_ids"),
        (((2, 2),), 0, 0, "holds no position"),
        (((3, 1),), 0, 0, "holds no position"),
        (((-1, 1),), 2, 2, "holds no position"),
        (((2, 4), (0, 2)), 4, 4, "not ascending"),
        (((0, 2), (1, 3)), 4, 4, "not ascending"),
    ],
)
def test_a_delivery_that_disagrees_with_itself_is_an_error(kept, ranges, num_rows, num_tokens, names):
    wrong = SinkDelivery(
        "r", None, 9, ranges, {HIDDEN_KEY: torch.zeros(num_rows, 3)}, np.zeros(num_tokens, dtype=np.int64)
    )
    with pytest.raises(RowsMismatchError, match="request 'r', step 9") as raised:
        kept.sink.accept(wrong)
    assert names in str(raised.value)


def test_an_aborted_request_delivers_nothing(kept, make):
    kept.sink.accept(make.delivery("r", (0, 4)))
    kept.sink.finish(make.ended("r", end=RequestEnd.ABORTED))
    with pytest.raises(UnknownRequestError):
        kept.read("r")


def test_a_request_ends_once(kept, make):
    kept.sink.accept(make.delivery("r", (0, 4)))
    kept.sink.finish(make.ended("r", end=RequestEnd.FLUSHED))
    with pytest.raises(RequestEndedError):
        kept.sink.accept(make.delivery("r", (4, 5)))
    with pytest.raises(RequestEndedError):
        kept.sink.finish(make.ended("r"))
    make.assert_rows_of(kept.read("r"), "r", range(4))


def test_close_drops_what_has_not_ended_and_keeps_what_has(kept, make):
    kept.sink.accept(make.delivery("done", (0, 4)))
    kept.sink.finish(make.ended("done"))
    kept.sink.accept(make.delivery("open", (0, 4)))
    kept.sink.close()
    kept.sink.close()
    make.assert_rows_of(kept.read("done"), "done", range(4))
    with pytest.raises(UnknownRequestError):
        kept.read("open")
    with pytest.raises(SinkClosedError):
        kept.sink.accept(make.delivery("late", (0, 1)))
    with pytest.raises(SinkClosedError):
        kept.sink.finish(make.ended("open"))
