# SPDX-License-Identifier: Apache-2.0
"""Whatever a sink, the cache or the builder itself raises for a request costs that request, and no thread."""

import logging

import pytest
from delivery_rig import BOUND_S, EndlessCache, deliver, running, step

from omni_core.integrations.vllm.delivery.builder import StartedRequest
from omni_core.prefix_cache.config import HIDDEN_KEY
from omni_core.prefix_cache.outputs import RequestRows, StageCacheOutputs
from omni_core.sinks.base import RequestEnd


class WithoutTextError(Exception):
    def __str__(self):
        raise ValueError("not even that")


RAISED = {
    "OSError": (OSError("the disk is full"), "OSError: the disk is full"),
    "SystemExit": (SystemExit(3), "SystemExit: 3"),
    "KeyboardInterrupt": (KeyboardInterrupt(), "KeyboardInterrupt: "),
    "WithoutTextError": (WithoutTextError(), "WithoutTextError, whose text cannot be had"),
}


@pytest.mark.parametrize("raised", RAISED)
@pytest.mark.parametrize("call", ["accept", "finish"])
def test_a_sink_that_raises_loses_that_request_only(cache, sink, caplog, call, raised):
    error, text = RAISED[raised]
    sink.broken = {(call, "a"): error}
    cache.script(1, {"a": [(0, 1)], "b": [(0, 1)]})
    cache.script(2, {"a": [(1, 2)], "b": [(1, 2)]})
    with caplog.at_level(logging.WARNING), running(cache, sink) as builder:
        builder.news([StartedRequest("a", [1], 0), StartedRequest("b", [2], 0)], [])
        deliver(builder, step(1, a=(0, [1]), b=(0, [2])))
        deliver(builder, step(2, a=(1, [3]), b=(1, [4])))
        builder.news([], ["a", "b"])
        builder.flush(BOUND_S)
        report = builder.report()
    assert sink.kinds_of("b") == ["rows", "rows", "end"]
    assert sink.kinds_of("a") == ([] if call == "accept" else ["rows", "rows"])
    assert report["sink_errors"] == {"a": f"the sink's {call}() raised {text}"}
    assert report["requests_with_sink_errors"] == len(caplog.records) == 1
    assert cache.released == [1, 2]
    assert sink.closed.is_set()


def test_a_sink_that_cannot_be_closed_is_reported_and_holds_nothing_up(cache, sink):
    sink.broken = {("close", None): SystemExit("no")}
    with running(cache, sink) as builder:
        pass
    assert builder.report()["stage_errors"] == ["closing the sink raised SystemExit: no"]


def test_a_cache_that_raises_system_exit_fails_the_steps_requests_only(cache, sink):
    cache.script(1, SystemExit("out"))
    cache.script(2, {"b": [(0, 1)]})
    with running(cache, sink) as builder:
        builder.news([StartedRequest("a", [1], 0), StartedRequest("b", [2], 0)], [])
        deliver(builder, step(1, a=(0, [1])))
        deliver(builder, step(2, b=(0, [2])))
        builder.flush(BOUND_S)
    assert sink.of("a") == [("end", "a", RequestEnd.FAILED, ((0, 1),), "step 1 could not be read: SystemExit: out")]
    assert sink.kinds_of("b") == ["rows", "end"]


def test_buffers_that_cannot_be_given_back_are_reported(sink):
    class NotTaken(EndlessCache):
        def materialize(self, step_id, req_ids, sampled_counts=None):
            served = super().materialize(step_id, req_ids)

            def release():
                raise RuntimeError("the pool is gone")

            return StageCacheOutputs(step_id, dict(served), {}, release)

    with running(NotTaken(), sink) as builder:
        builder.news([StartedRequest("a", [1], 0)], [])
        deliver(builder, step(0, a=(0, [1])))
        builder.flush(BOUND_S)
        assert builder.report()["stage_errors"] == [
            "giving a step's buffers back raised RuntimeError: the pool is gone"
        ]
    assert sink.kinds_of("a") == ["rows", "end"]


def test_rows_the_builder_cannot_deal_with_cost_their_request_only(sink):
    class Odd(EndlessCache):
        def materialize(self, step_id, req_ids, sampled_counts=None):
            served = dict(super().materialize(step_id, req_ids))
            served["a"] = RequestRows("a", ((0, 1),), served["a"].rows, key_ranges={HIDDEN_KEY: (None,)})
            return StageCacheOutputs(step_id, served, {}, lambda: None)

    with running(Odd(), sink) as builder:
        builder.news([StartedRequest("a", [1], 0), StartedRequest("b", [2], 0)], [])
        deliver(builder, step(0, a=(0, [1]), b=(0, [2])))
        builder.news([], ["a", "b"])
        builder.flush(BOUND_S)
        report = builder.report()
    assert "the builder could not deal with it: TypeError" in report["failures"]["a"]
    assert report["requests_open"] == 0
    assert [entry[2] for entry in sink.of("a")] == [RequestEnd.FAILED]
    assert sink.kinds_of("b") == ["rows", "end"]


def test_a_request_whose_name_cannot_be_told_fails_alone(cache, sink):
    def client_request_of(req_id):
        if req_id == "a":
            raise LookupError("no such client")

    cache.script(1, {"a": [(0, 1)], "b": [(0, 1)]})
    with running(cache, sink, client_request_of=client_request_of) as builder:
        builder.news([StartedRequest("a", [1], 0), StartedRequest("b", [2], 0)], [])
        deliver(builder, step(1, a=(0, [1]), b=(0, [2])))
        builder.flush(BOUND_S)
        assert "LookupError: no such client" in builder.report()["failures"]["a"]
    assert sink.kinds_of("b") == ["rows", "end"]


def test_records_and_log_lines_stay_bounded_however_many_requests_fail(sink, caplog):
    cache = EndlessCache()
    sink.broken = {("accept", f"r{number}"): OSError("full") for number in range(1500)}
    with caplog.at_level(logging.WARNING), running(cache, sink) as builder:
        for number in range(1500):
            builder.news([StartedRequest(f"r{number}", [1], 0)], [f"r{number - 1}"])
            deliver(builder, step(number, **{f"r{number}": (0, [1])}))
        builder.flush(BOUND_S)
        report = builder.report()
    assert report["requests_with_sink_errors"] == 1500
    assert list(report["sink_errors"]) == [f"r{number}" for number in range(476, 1500)]
    assert len(caplog.records) == 100
    assert "further requests appear in the report only" in caplog.records[-1].message


def test_when_the_stage_is_turned_off_its_open_requests_fail_once_and_nothing_is_left(cache, sink, caplog):
    cache.script(1, {"a": [(0, 1)]})
    with caplog.at_level(logging.WARNING), running(cache, sink) as builder:
        builder.news([StartedRequest("a", [1, 2], 0), StartedRequest("b", [2], 0)], [])
        deliver(builder, step(1, a=(0, [1])))
        builder.fail_open_requests("the cache was turned off: TypeError")
        builder.fail_open_requests("the cache was turned off: TypeError")
        builder.flush(BOUND_S)
        report = builder.report()
    assert report["failures"] == dict.fromkeys("ab", "the cache was turned off: TypeError")
    assert (report["requests_failed"], report["requests_open"], report["entries_waiting"]) == (2, 0, 0)
    assert sink.of("a")[-1] == ("end", "a", RequestEnd.FAILED, ((1, 2),), "the cache was turned off: TypeError")
    assert [entry[2] for entry in sink.of("b")] == [RequestEnd.FAILED]
    assert caplog.records == []  # who turns the stage off says so, once
