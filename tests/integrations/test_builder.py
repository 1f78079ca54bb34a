# SPDX-License-Identifier: Apache-2.0
"""The builder thread: every saved step reaches the sink, in order, and no failure of it reaches the engine."""

import json
import threading
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from omni_core.integrations.vllm.builder import BuiltStep, StageBuilder, StartedRequest
from omni_core.integrations.vllm.errors import FlushTimeoutError
from omni_core.prefix_cache.config import HIDDEN_KEY
from omni_core.prefix_cache.errors import HitRowsAbsentError
from omni_core.prefix_cache.outputs import RequestRows, StageCacheOutputs
from omni_core.runtime import ThreadingRuntime
from omni_core.sinks.base import RequestEnd, StageSink

BOUND_S = 20.0
AT_ONCE_S = 0.05


class ScriptedCache:
    """Answers `materialize` from a script; a request's row at a position is the position itself."""

    def __init__(self):
        self.outputs = {}
        self.released = []

    def script(self, step_id, served, failed=None):
        self.outputs[step_id] = (served, failed or {})

    def materialize(self, step_id, req_ids, sampled_counts=None):
        served, failed = self.outputs[step_id]
        if isinstance(served, Exception):
            raise served
        rows = {
            req_id: RequestRows(req_id, tuple(ranges), {HIDDEN_KEY: rows_at(ranges)})
            for req_id, ranges in served.items()
        }
        return StageCacheOutputs(step_id, rows, failed, lambda: self.released.append(step_id))


class RecordingSink(StageSink):
    """Writes down what it is told; `gate` holds `accept` back, `broken` names requests whose calls raise."""

    def __init__(self):
        self.told = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.broken = {}
        self.closed = threading.Event()
        self.threads = set()

    def accept(self, delivery):
        self.threads.add(threading.current_thread().name)
        self.entered.set()
        assert self.gate.wait(BOUND_S)
        self._maybe_raise("accept", delivery.req_id)
        rows = {key: value.flatten().tolist() for key, value in delivery.rows.items()}
        tokens = delivery.token_ids.tolist()
        self.told.append(("rows", delivery.req_id, delivery.step_id, delivery.ranges, rows, tokens))

    def finish(self, end):
        self._maybe_raise("finish", end.req_id)
        self.told.append(("end", end.req_id, end.end, end.missing, end.error))

    def close(self):
        self.closed.set()

    def _maybe_raise(self, call, req_id):
        if self.broken.get(req_id) == call:
            raise OSError(f"{call} of {req_id} is broken")

    def of(self, req_id):
        return [entry for entry in self.told if entry[1] == req_id]


def rows_at(ranges):
    return torch.tensor([[float(p)] for start, stop in ranges for p in range(start, stop)])


def step(step_id, **runs):
    """`a=(first, tokens)`: request `a` computed `tokens` from position `first` on."""
    lengths = [len(tokens) for _, tokens in runs.values()]
    positions = [np.arange(first, first + len(tokens)) for first, tokens in runs.values()]
    return BuiltStep(
        step_id,
        tuple(runs),
        np.concatenate(([0], np.cumsum(lengths))),
        np.concatenate(positions),
        np.concatenate([np.asarray(tokens) for _, tokens in runs.values()]),
    )


@pytest.fixture
def cache():
    return ScriptedCache()


@pytest.fixture
def sink():
    return RecordingSink()


@contextmanager
def running(cache, sink, **options):
    options = {"max_open_steps": 2, "room_timeout_s": BOUND_S, "runtime": ThreadingRuntime()} | options
    builder = StageBuilder(cache, sink, client_req_id_of=lambda req_id: f"client of {req_id}", **options)
    try:
        yield builder
    finally:
        sink.gate.set()
        assert builder.close(BOUND_S)


def deliver(builder, one):
    assert builder.room_for_step()
    builder.submit(one)


def test_rows_come_with_the_tokens_at_their_positions_hits_included(cache, sink):
    cache.script(1, {"a": [(0, 5)]})
    cache.script(2, {"a": [(5, 6)]})
    with running(cache, sink) as builder:
        builder.news([StartedRequest("a", [10, 11, 12, 13, 14], 3)], [])
        deliver(builder, step(1, a=(3, [13, 14])))
        deliver(builder, step(2, a=(5, [77])))
        builder.flush(BOUND_S)
    assert sink.told == [
        ("rows", "a", 1, ((0, 5),), {HIDDEN_KEY: [0.0, 1.0, 2.0, 3.0, 4.0]}, [10, 11, 12, 13, 14]),
        ("rows", "a", 2, ((5, 6),), {HIDDEN_KEY: [5.0]}, [77]),
        ("end", "a", RequestEnd.FLUSHED, (), None),
    ]
    assert cache.released == [1, 2]


def test_the_end_of_a_request_comes_after_its_last_rows(cache, sink):
    cache.script(1, {"a": [(0, 2)], "b": [(0, 1)]})
    cache.script(2, {"b": [(1, 2)]})
    sink.gate.clear()
    with running(cache, sink) as builder:
        builder.news([StartedRequest("a", [1, 2], 0), StartedRequest("b", [3], 0)], [])
        deliver(builder, step(1, a=(0, [1, 2]), b=(0, [3])))
        builder.news([], ["a"])
        deliver(builder, step(2, b=(1, [4])))
        sink.gate.set()
        builder.flush(BOUND_S, still_running=["b"])
        assert [entry[0] for entry in sink.of("a")] == ["rows", "end"]
        assert sink.of("a")[-1][2] is RequestEnd.FINISHED
        assert [entry[0] for entry in sink.of("b")] == ["rows", "rows"]


def test_the_sink_is_called_by_the_builders_thread_only_and_closed_by_it(cache, sink):
    bound = []
    cache.script(1, {"a": [(0, 1)]})
    with running(cache, sink, bind_thread=lambda: bound.append(threading.current_thread().name)) as builder:
        builder.news([StartedRequest("a", [1], 0)], [])
        deliver(builder, step(1, a=(0, [1])))
    assert sink.closed.is_set()
    assert bound == list(sink.threads) == ["omni-core-builder"]


def test_a_request_the_cache_cannot_serve_fails_with_its_reason_and_the_others_are_whole(cache, sink):
    reason = HitRowsAbsentError("a", "hit [0, 4) has no rows")
    cache.script(1, {"b": [(0, 1)]}, {"a": reason})
    cache.script(2, {"b": [(1, 2)]}, {"a": reason})
    with running(cache, sink) as builder:
        builder.news([StartedRequest("a", [1, 2, 3, 4, 5], 4), StartedRequest("b", [6], 0)], [])
        deliver(builder, step(1, a=(4, [5]), b=(0, [6])))
        deliver(builder, step(2, a=(5, [7]), b=(1, [8])))
        builder.news([], ["a", "b"])
        builder.flush(BOUND_S)
        report = builder.report()
    assert sink.of("a") == [("end", "a", RequestEnd.FAILED, ((0, 5),), str(reason))]
    assert [entry[0] for entry in sink.of("b")] == ["rows", "rows", "end"]
    assert report["failures"] == {"a": str(reason)}
    assert report["requests_failed"] == 1


def test_a_step_that_cannot_be_read_fails_its_requests_and_the_next_step_goes_on(cache, sink):
    cache.script(1, RuntimeError("the copy of step 1 failed"))
    cache.script(2, {"b": [(0, 1)]})
    with running(cache, sink) as builder:
        builder.news([StartedRequest("a", [1], 0), StartedRequest("b", [2], 0)], [])
        deliver(builder, step(1, a=(0, [1])))
        deliver(builder, step(2, b=(0, [2])))
        builder.flush(BOUND_S)
        report = builder.report()
    assert sink.of("a")[0][2] is RequestEnd.FAILED
    assert "step 1 could not be read: the copy of step 1 failed" in sink.of("a")[0][4]
    assert [entry[0] for entry in sink.of("b")] == ["rows", "end"]
    assert len(report["stage_errors"]) == 1


@pytest.mark.parametrize("call", ["accept", "finish"])
def test_a_sink_that_raises_loses_that_request_only(cache, sink, call):
    sink.broken = {"a": call}
    cache.script(1, {"a": [(0, 1)], "b": [(0, 1)]})
    cache.script(2, {"a": [(1, 2)], "b": [(1, 2)]})
    with running(cache, sink) as builder:
        builder.news([StartedRequest("a", [1], 0), StartedRequest("b", [2], 0)], [])
        deliver(builder, step(1, a=(0, [1]), b=(0, [2])))
        deliver(builder, step(2, a=(1, [3]), b=(1, [4])))
        builder.news([], ["a", "b"])
        builder.flush(BOUND_S)
        report = builder.report()
    assert [entry[0] for entry in sink.of("b")] == ["rows", "rows", "end"]
    assert [entry[0] for entry in sink.of("a")] == ([] if call == "accept" else ["rows", "rows"])
    assert report["sink_errors"] == {"a": f"the sink's {call}() raised OSError: {call} of a is broken"}
    assert cache.released == [1, 2]


class WaitsOfTheEngine(ThreadingRuntime):
    """Counts the waits of the thread that made it."""

    def __init__(self):
        self.count = 0
        self._engine = threading.current_thread()

    def condition(self, lock, name):
        inner, outer = super().condition(lock, name), self

        class Counted:
            def wait_for(self, predicate, timeout_s):
                outer.count += threading.current_thread() is outer._engine
                return inner.wait_for(predicate, timeout_s)

            def notify_all(self):
                inner.notify_all()

        return Counted()


def test_a_stalled_sink_delays_the_engine_once_per_stall(cache, sink):
    waits = WaitsOfTheEngine()
    cache.script(1, {"a": [(0, 1)]})
    cache.script(2, {"a": [(1, 2)]})
    with running(cache, sink, max_open_steps=1, room_timeout_s=AT_ONCE_S, runtime=waits) as builder:
        builder.news([StartedRequest("a", [1], 0)], [])
        for number, one in enumerate((step(1, a=(0, [1])), step(2, a=(1, [2]))), start=1):
            sink.gate.clear()
            sink.entered.clear()
            waits.count = 0
            deliver(builder, one)
            assert waits.count == 0
            assert sink.entered.wait(BOUND_S)
            assert not builder.room_for_step()
            assert not builder.room_for_step()
            assert waits.count == 1
            assert builder.report()["stalls"] == number
            sink.gate.set()
            builder.flush(BOUND_S, still_running=["a"])


def test_rows_of_a_step_given_up_come_later_with_their_tokens(cache, sink):
    cache.script(1, {"a": [(0, 1)]})
    cache.script(3, {"a": [(1, 2), (2, 3)]})
    with running(cache, sink) as builder:
        builder.news([StartedRequest("a", [1], 0)], [])
        deliver(builder, step(1, a=(0, [1])))
        builder.give_up(step(2, a=(1, [22])))
        deliver(builder, step(3, a=(2, [33])))
        builder.flush(BOUND_S)
        report = builder.report()
    assert sink.told[1] == ("rows", "a", 3, ((1, 2), (2, 3)), {HIDDEN_KEY: [1.0, 2.0]}, [22, 33])
    assert sink.told[2] == ("end", "a", RequestEnd.FLUSHED, (), None)
    assert report["steps_given_up"] == 1


def test_rows_of_a_step_given_up_that_never_come_are_reported_missing(cache, sink):
    cache.script(1, {"a": [(0, 1)]})
    with running(cache, sink) as builder:
        builder.news([StartedRequest("a", [1], 0)], [])
        deliver(builder, step(1, a=(0, [1])))
        builder.give_up(step(2, a=(1, [22])))
        builder.news([], ["a"])
        builder.flush(BOUND_S)
    assert sink.told[-1] == ("end", "a", RequestEnd.FINISHED, ((1, 2),), None)


def test_a_request_aborted_before_it_ran_is_not_mentioned(cache, sink):
    with running(cache, sink) as builder:
        builder.news([StartedRequest("a", [1], 0)], [])
        builder.news([], ["a", "never heard of"])
        builder.flush(BOUND_S)
        assert builder.report()["requests_open"] == 0
    assert sink.told == []


def test_a_request_flushed_too_early_is_reported_and_gets_no_second_end(cache, sink):
    cache.script(1, {"a": [(0, 1)]})
    cache.script(2, {"a": [(1, 2)]})
    with running(cache, sink) as builder:
        builder.news([StartedRequest("a", [1], 0)], [])
        deliver(builder, step(1, a=(0, [1])))
        builder.flush(BOUND_S)
        deliver(builder, step(2, a=(1, [2])))
        builder.news([], ["a"])
        builder.flush(BOUND_S)
        report = builder.report()
    assert [entry[0] for entry in sink.of("a")] == ["rows", "end"]
    assert "[(1, 2)] came after a flush had ended it" in report["failures"]["a"]


def test_a_flush_that_cannot_complete_says_what_it_waits_for(cache, sink):
    cache.script(1, {"a": [(0, 1)]})
    sink.gate.clear()
    with running(cache, sink) as builder:
        builder.news([StartedRequest("a", [1], 0)], [])
        deliver(builder, step(1, a=(0, [1])))
        assert sink.entered.wait(BOUND_S)
        with pytest.raises(FlushTimeoutError, match="busy with step 1 of 1 requests"):
            builder.flush(AT_ONCE_S)
        sink.gate.set()
        builder.flush(BOUND_S)
    assert [entry[0] for entry in sink.told] == ["rows", "end"]


def test_open_requests_can_be_failed_together(cache, sink):
    cache.script(1, {"a": [(0, 1)]})
    with running(cache, sink) as builder:
        builder.news([StartedRequest("a", [1], 0), StartedRequest("b", [2], 0)], [])
        deliver(builder, step(1, a=(0, [1])))
        builder.fail_open_requests("the cache was turned off")
        builder.flush(BOUND_S)
        assert builder.report()["failures"] == dict.fromkeys("ab", "the cache was turned off")
    assert sink.of("a")[-1] == ("end", "a", RequestEnd.FAILED, (), "the cache was turned off")
    assert sink.of("b") == [("end", "b", RequestEnd.FAILED, (), "the cache was turned off")]


def test_closing_delivers_what_was_submitted_first(cache, sink):
    cache.script(1, {"a": [(0, 1)]})
    with running(cache, sink) as builder:
        builder.news([StartedRequest("a", [1], 0)], [])
        deliver(builder, step(1, a=(0, [1])))
        assert builder.close(BOUND_S)
        assert [entry[0] for entry in sink.told] == ["rows", "end"]
        assert sink.closed.is_set()
        assert builder.close(BOUND_S)


def test_closing_does_not_wait_for_a_stuck_sink_for_ever(cache, sink):
    cache.script(1, {"a": [(0, 1)]})
    sink.gate.clear()
    with running(cache, sink) as builder:
        builder.news([StartedRequest("a", [1], 0)], [])
        deliver(builder, step(1, a=(0, [1])))
        assert sink.entered.wait(BOUND_S)
        assert not builder.close(AT_ONCE_S)
        assert not sink.closed.is_set()


def test_the_report_is_plain_data(cache, sink):
    cache.script(1, {"a": [(0, 2)]})
    with running(cache, sink) as builder:
        builder.news([StartedRequest("a", [1, 2], 1)], [])
        deliver(builder, step(1, a=(1, [2])))
        builder.flush(BOUND_S)
        report = json.loads(json.dumps(builder.report()))
    assert report["steps_delivered"] == report["deliveries"] == report["requests_ended"] == 1
    assert report["rows_delivered"] == 2
    assert report["steps_open"] == report["requests_open"] == 0
