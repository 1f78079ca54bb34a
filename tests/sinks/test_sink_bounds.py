# SPDX-License-Identifier: Apache-2.0
"""What sinks hold in memory is bounded in bytes; what finds no room is dropped by name, and its memory given back."""

from inspect import signature

import numpy as np
import pytest
import torch

from omni_core.prefix_cache.config import HIDDEN_KEY
from omni_core.sinks.base import RequestEnd, SinkDelivery
from omni_core.sinks.errors import (
    DuplicateRowsError,
    InvalidSinkOptionError,
    RequestEndedError,
    RowsGapError,
    SinkFullError,
    UnknownRequestError,
)
from omni_core.sinks.memory import MemorySink
from omni_core.sinks.safetensors_files import SafetensorsSink, read_request_file, request_files
from omni_core.sinks.sizes import ENTRY_BYTES, delivery_nbytes, held_nbytes

ROW_BYTES = 3 * 4 + 8
"""Three float32 numbers and the token id."""
OPEN_BYTES = 4 * ROW_BYTES + 2 * ENTRY_BYTES
"""A request of four rows that came with one delivery of one key."""
ENDED_BYTES = 4 * ROW_BYTES


class InMemory:
    limit_name = "max_bytes"

    def __init__(self, folder, **options):
        self.sink = MemorySink(**options)

    @classmethod
    def limited(cls, folder, max_bytes):
        return cls(folder, max_bytes=max_bytes)

    def held_bytes(self):
        return self.sink.held_bytes

    def ids(self):
        return set(self.sink.request_ids())


class InFiles:
    limit_name = "max_open_bytes"

    def __init__(self, folder, **options):
        self.sink = SafetensorsSink(folder, **options)

    @classmethod
    def limited(cls, folder, max_bytes):
        return cls(folder, max_open_bytes=max_bytes)

    def held_bytes(self):
        return self.sink.open_bytes

    def ids(self):
        return {read_request_file(path).req_id for path in request_files(self.sink.directory)}


@pytest.fixture(params=[InMemory, InFiles])
def kind(request):
    return request.param


def store(sink, make, req_id, count=4):
    sink.accept(make.delivery(req_id, (0, count)))
    sink.finish(make.ended(req_id))


def test_rows_token_ids_leftovers_and_their_objects_are_counted(kind, tmp_path, make):
    kept = kind(tmp_path)
    leftovers = {"meta": {"x": [torch.zeros(5)]}, "ids": (np.zeros(2), "four"), "count": 7}
    kept.sink.accept(make.delivery("r", (0, 2), (4, 6), keys=(HIDDEN_KEY, "codes"), leftovers=leftovers))
    rows_bytes = 4 * (2 * 3 * 4 + 8)
    assert kept.held_bytes() == rows_bytes + (5 * 4 + 2 * 8 + len("four")) + (1 + 2 * 2 + 2) * ENTRY_BYTES
    kept.sink.accept(make.delivery("r", (2, 4), keys=(HIDDEN_KEY, "codes")))
    assert kept.held_bytes() == delivery_nbytes(
        make.delivery("r", (0, 2), (4, 6), keys=(HIDDEN_KEY, "codes"), leftovers=leftovers)
    ) + delivery_nbytes(make.delivery("r", (2, 4), keys=(HIDDEN_KEY, "codes")))


def test_a_memory_sink_counts_what_ended_requests_keep_until_they_are_taken(make):
    sink = MemorySink()
    for req_id in ("a", "b", "c"):
        store(sink, make, req_id)
    assert sink.held_bytes == 3 * ENDED_BYTES
    assert sink.request("a").nbytes == ENDED_BYTES
    sink.take("a")
    assert sink.held_bytes == 2 * ENDED_BYTES
    assert sink.forget(("b", 0))
    assert sink.held_bytes == ENDED_BYTES
    sink.accept(make.delivery("open", (0, 4)))
    assert sink.held_bytes == ENDED_BYTES + OPEN_BYTES


def test_the_bytes_of_a_request_that_max_requests_drops_are_given_back(make):
    sink = MemorySink(max_requests=2)
    for number in range(20):
        store(sink, make, f"r{number}")
        assert sink.held_bytes <= 2 * ENDED_BYTES


@pytest.mark.parametrize("end", [RequestEnd.FAILED, RequestEnd.ABORTED])
def test_a_request_without_rows_to_keep_gives_its_bytes_back_at_its_end(kind, tmp_path, make, end):
    kept = kind(tmp_path)
    kept.sink.accept(make.delivery("other", (0, 4)))
    kept.sink.accept(make.delivery("r", (0, 100)))
    kept.sink.finish(make.ended("r", end=end, error="no"))
    assert kept.held_bytes() == OPEN_BYTES


def test_a_request_whose_rows_do_not_fit_together_gives_its_bytes_back_at_once(kind, tmp_path, make):
    kept = kind(tmp_path)
    kept.sink.accept(make.delivery("other", (0, 4)))
    kept.sink.accept(make.delivery("twice", (0, 100)))
    with pytest.raises(DuplicateRowsError):
        kept.sink.accept(make.delivery("twice", (99, 100)))
    kept.sink.accept(make.delivery("hole", (0, 1)))
    kept.sink.accept(make.delivery("hole", (2, 3)))
    with pytest.raises(RowsGapError):
        kept.sink.finish(make.ended("hole"))
    assert kept.held_bytes() == OPEN_BYTES


def test_close_gives_the_bytes_of_open_requests_back(kind, tmp_path, make):
    kept = kind(tmp_path)
    kept.sink.accept(make.delivery("open", (0, 4)))
    kept.sink.close()
    assert kept.held_bytes() == 0


def test_open_requests_that_reach_the_limit_go_on_and_the_one_beyond_fails_by_name(kind, tmp_path, make):
    kept = kind.limited(tmp_path, 2 * OPEN_BYTES)
    kept.sink.accept(make.delivery("a", (0, 4)))
    kept.sink.accept(make.delivery("b", (0, 4)))
    with pytest.raises(SinkFullError, match=f"request 'c', step 7.*above {kind.limit_name}={2 * OPEN_BYTES}"):
        kept.sink.accept(make.delivery("c", (0, 1), step_id=7))
    assert kept.held_bytes() == 2 * OPEN_BYTES
    kept.sink.finish(make.ended("a"))
    kept.sink.finish(make.ended("b"))
    assert kept.ids() == {"a", "b"}


def test_the_request_that_grows_beyond_the_limit_loses_all_its_rows_at_once_and_makes_room(kind, tmp_path, make):
    kept = kind.limited(tmp_path, 3 * OPEN_BYTES)
    kept.sink.accept(make.delivery("a", (0, 4)))
    kept.sink.accept(make.delivery("b", (0, 4)))
    kept.sink.accept(make.delivery("b", (4, 8)))
    with pytest.raises(SinkFullError, match="request 'b'"):
        kept.sink.accept(make.delivery("b", (8, 12)))
    assert kept.held_bytes() == OPEN_BYTES
    with pytest.raises(RequestEndedError, match="'b'"):
        kept.sink.accept(make.delivery("b", (12, 13)))
    kept.sink.accept(make.delivery("c", (0, 4)))
    for req_id in ("a", "c"):
        kept.sink.finish(make.ended(req_id))
    assert kept.ids() == {"a", "c"}


def test_many_small_steps_are_bounded_though_their_rows_are_few_bytes(kind, tmp_path, make):
    kept = kind.limited(tmp_path, 100 * ENTRY_BYTES)
    for position in range(49):  # each delivery and its one tensor count as an entry
        kept.sink.accept(make.delivery("r", (position, position + 1)))
    with pytest.raises(SinkFullError):
        kept.sink.accept(make.delivery("r", (49, 50)))


def test_the_oldest_ended_requests_make_room_for_rows_and_say_so(make):
    limit = OPEN_BYTES + 3 * ENDED_BYTES
    sink = MemorySink(max_bytes=limit)
    for number in range(10):
        store(sink, make, f"r{number}")
        assert sink.held_bytes <= limit
    assert sink.request_ids() == ("r6", "r7", "r8", "r9")
    with pytest.raises(
        UnknownRequestError, match=f"'r5' has no rows: it was dropped for newer ones, max_bytes={limit}"
    ):
        sink.request("r5")


def test_ended_requests_stay_where_dropping_them_would_not_help(make):
    sink = MemorySink(max_bytes=OPEN_BYTES + ENDED_BYTES)
    store(sink, make, "ended")
    with pytest.raises(SinkFullError, match="request 'big'"):
        sink.accept(make.delivery("big", (0, 1000)))
    assert sink.request_ids() == ("ended",)
    with pytest.raises(UnknownRequestError, match="'big' has no rows: the sink was full: request 'big', step 0"):
        sink.request("big")


def test_rows_that_do_not_fit_together_cost_no_ended_request(make):
    wrong = make.delivery("r", (3, 8))
    sink = MemorySink(max_bytes=OPEN_BYTES + delivery_nbytes(wrong))
    store(sink, make, "ended")
    sink.accept(make.delivery("r", (0, 4)))
    with pytest.raises(DuplicateRowsError):
        sink.accept(wrong)
    assert sink.request_ids() == ("ended",)


def test_the_limits_are_numbers_also_if_nobody_sets_them(kind, tmp_path):
    default = signature(type(kind(tmp_path).sink)).parameters[kind.limit_name].default
    assert default == 4 * 1024**3
    with pytest.raises(InvalidSinkOptionError, match=f"{kind.limit_name}=0"):
        kind.limited(tmp_path, 0)
    with pytest.raises(InvalidSinkOptionError, match=f"{kind.limit_name}=None"):
        kind.limited(tmp_path, None)


def test_deliveries_that_wait_hold_whole_buffers_each_once():
    """The rows of a step are pieces of one buffer per key; it stays as long as one of them waits."""
    buffer = torch.zeros(1000, 3)
    pieces = [delivery_of(f"r{index}", buffer[2 * index : 2 * index + 2]) for index in range(3)]
    rows = sum(piece.rows[HIDDEN_KEY].nbytes for piece in pieces)
    assert held_nbytes(pieces) == sum(map(delivery_nbytes, pieces)) - rows + buffer.nbytes
    assert held_nbytes(pieces[:1]) > buffer.nbytes
    assert held_nbytes([]) == 0


def delivery_of(req_id, rows):
    positions = len(rows)
    return SinkDelivery(req_id, None, 0, ((0, positions),), {HIDDEN_KEY: rows}, np.arange(positions))
