# SPDX-License-Identifier: Apache-2.0
"""The memory sink: asked by either id, from any thread, bounded, and never a wrong request's rows."""

from dataclasses import replace

import pytest
import torch

from omni_core.runtime import ThreadingRuntime
from omni_core.sinks.base import PossibleSample, RequestEnd
from omni_core.sinks.errors import AmbiguousRequestError, InvalidSinkOptionError, UnknownRequestError
from omni_core.sinks.memory import MemorySink


def store(sink, make, req_id, client=None, count=4, **names):
    sink.accept(replace(make.delivery(req_id, (0, count), client=client), **names))
    sink.finish(replace(make.ended(req_id, client=client), **names))


def test_rows_by_the_engines_id_or_the_clients(make):
    sink = MemorySink()
    store(sink, make, "0-81bdb22f", client="0")
    assert sink.request("0") is sink.request("0-81bdb22f")
    make.assert_rows_of(sink.request("0"), "0-81bdb22f", range(4))


def test_parallel_samples_of_one_client_id_are_named_not_guessed(make):
    sink = MemorySink()
    for index in (0, 1):
        store(sink, make, f"{index}_a-81bdb22f", f"{index}_a", sample=PossibleSample("a", "a-81bdb22f", index))
    with pytest.raises(AmbiguousRequestError, match="'0_a-81bdb22f', '1_a-81bdb22f'"):
        sink.request("a")
    assert [stored.req_id for stored in sink.requests_of_client("a")] == ["0_a-81bdb22f", "1_a-81bdb22f"]
    make.assert_rows_of(sink.request("1_a"), "1_a-81bdb22f", range(4))
    make.assert_rows_of(sink.request("1_a-81bdb22f"), "1_a-81bdb22f", range(4))
    assert sink.request("0_a").sample == PossibleSample("a", "a-81bdb22f", 0)


def test_a_clients_own_id_that_looks_like_a_samples_is_its_own(make):
    sink = MemorySink()
    store(sink, make, "0_a-81bdb22f", "0_a", sample=PossibleSample("a", "a-81bdb22f", 0))
    make.assert_rows_of(sink.request("0_a"), "0_a-81bdb22f", range(4))
    with pytest.raises(UnknownRequestError, match="no request 'a'"):
        sink.request("a")


def test_an_id_used_again_never_answers_with_the_first_requests_rows(make):
    sink = MemorySink()
    store(sink, make, "a", "a", count=3)
    store(sink, make, "a", "a", count=4, use=1)
    with pytest.raises(AmbiguousRequestError, match=r"'a', 'a' \(use 2\)"):
        sink.request("a")
    make.assert_rows_of(sink.request_by_internal_id("a"), "a", range(4))
    sink.accept(replace(make.delivery("a", (0, 5), client="a"), use=2))
    with pytest.raises(UnknownRequestError, match=r"'a' \(use 3\) has not ended"):
        sink.request_by_internal_id("a")


def test_the_index_is_as_bounded_as_the_requests(make):
    sink = MemorySink(max_requests=2)
    for number in range(50):
        store(sink, make, f"{number}", f"client {number}")
    for number in range(46):
        assert sink.requests_of_client(f"client {number}") == ()
        with pytest.raises(UnknownRequestError, match="no request"):
            sink.request(f"client {number}")


def test_a_client_id_that_looks_like_anothers_internal_id_never_gives_its_rows(make):
    sink = MemorySink()
    store(sink, make, "a-1", client="a")
    store(sink, make, "b-2", client="a-1")
    with pytest.raises(AmbiguousRequestError, match="'a-1', 'b-2'"):
        sink.request("a-1")
    assert sink.request_by_internal_id("a-1").client_req_id == "a"
    assert [stored.req_id for stored in sink.requests_of_client("a-1")] == ["b-2"]


def test_an_unknown_id_names_the_ids_there_are(make):
    sink = MemorySink()
    with pytest.raises(UnknownRequestError, match="no request 'x'; ids kept: none"):
        sink.request("x")
    store(sink, make, "0-81bdb22f", client="0")
    with pytest.raises(KeyError) as raised:
        sink.request("x")
    assert str(raised.value) == "no request 'x'; ids kept: \"0-81bdb22f (client's 0)\""


@pytest.mark.parametrize(
    ("end", "why"),
    [
        (RequestEnd.FAILED, "it failed: HitRowsAbsentError: rows of block 5"),
        (RequestEnd.ABORTED, "it was aborted; keep_aborted=True keeps what came before"),
    ],
)
def test_a_request_without_rows_says_why(make, end, why):
    sink = MemorySink()
    sink.accept(make.delivery("a-1", (0, 4), client="a"))
    sink.finish(make.ended("a-1", end=end, client="a", error="HitRowsAbsentError: rows of block 5"))
    for asked in ("a", "a-1"):
        with pytest.raises(UnknownRequestError) as raised:
            sink.request(asked)
        assert str(raised.value) == f"request 'a-1' has no rows: {why}"


def test_a_running_request_is_not_given_half(make):
    sink = MemorySink()
    sink.accept(make.delivery("a-1", (0, 4), client="a"))
    with pytest.raises(UnknownRequestError, match="request 'a-1' has not ended"):
        sink.request("a")


def test_keep_aborted_keeps_what_came_before_the_abort(make):
    sink = MemorySink(keep_aborted=True)
    sink.accept(make.delivery("r", (0, 4)))
    sink.finish(make.ended("r", end=RequestEnd.ABORTED))
    stored = sink.request("r")
    assert stored.end is RequestEnd.ABORTED
    assert not stored.complete
    make.assert_rows_of(stored, "r", range(4))


def test_the_oldest_requests_make_room(make):
    sink = MemorySink(max_requests=3)
    for number in range(10):
        store(sink, make, f"r{number}")
    assert sink.request_ids() == ("r7", "r8", "r9")
    with pytest.raises(UnknownRequestError, match=r"'r6' has no rows: it was dropped for newer ones, max_requests=3"):
        sink.request("r6")
    with pytest.raises(UnknownRequestError, match="no request 'r0'"):
        sink.request("r0")


def test_take_gives_the_rows_up(make):
    sink = MemorySink()
    store(sink, make, "a-1", client="a")
    make.assert_rows_of(sink.take("a"), "a-1", range(4))
    assert sink.request_ids() == ()


@pytest.mark.parametrize("value", ["false", 1, None])
def test_a_text_or_number_does_not_pass_for_a_truth_value(value):
    with pytest.raises(InvalidSinkOptionError, match=f"keep_aborted={value!r}: must be true or false"):
        MemorySink(keep_aborted=value)


@pytest.mark.parametrize("value", [0, -1, True, 2.0, "3"])
def test_a_bound_that_makes_no_sense_is_refused(value):
    with pytest.raises(InvalidSinkOptionError, match=f"max_requests={value!r}"):
        MemorySink(max_requests=value)


def test_leftovers_are_kept_in_order_and_copied(make):
    sink = MemorySink()
    meta = torch.tensor([1.0])
    sink.accept(make.delivery("r", (0, 2), leftovers={"meta": {"x": [meta]}, "note": "first"}))
    meta.fill_(-1)
    sink.accept(make.delivery("r", (2, 3), leftovers={"note": "second"}))
    sink.finish(make.ended("r"))
    stored = sink.request("r")
    assert stored.leftovers["note"] == ("first", "second")
    assert stored.leftovers["meta"][0]["x"][0].item() == 1.0


def test_another_thread_reads_whole_requests_while_the_builder_writes(make):
    runtime = ThreadingRuntime()
    sink = MemorySink(runtime=runtime)
    total = 60
    seen = []

    def read_until_all_are_there():
        deadline_s = runtime.monotonic_s() + 30
        while len(seen) < total and runtime.monotonic_s() < deadline_s:
            seen.extend(sink.request(req_id) for req_id in sink.request_ids()[len(seen) :])

    reader = runtime.spawn("reader", read_until_all_are_there)
    for number in range(total):
        sink.accept(make.delivery(f"r{number}", (3, 6)))
        sink.accept(make.delivery(f"r{number}", (0, 3)))
        sink.finish(make.ended(f"r{number}"))
    assert reader.join(timeout_s=40)
    assert len(seen) == total
    for number, stored in enumerate(seen):
        make.assert_rows_of(stored, f"r{number}", range(6))
