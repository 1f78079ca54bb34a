# SPDX-License-Identifier: Apache-2.0
"""The builder: every saved step reaches the sink, in order, with its tokens, and every request its end."""

import json
import threading

import pytest
from delivery_rig import AT_ONCE_S, BOUND_S, deliver, running, step

from omni_core.integrations.vllm.delivery.builder import StartedRequest
from omni_core.integrations.vllm.errors import FlushTimeoutError
from omni_core.prefix_cache.config import HIDDEN_KEY
from omni_core.prefix_cache.errors import HitRowsAbsentError
from omni_core.runtime import ThreadingRuntime
from omni_core.sinks.base import RequestEnd


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


def test_the_sink_is_called_and_closed_by_the_feeders_thread_only(cache, sink):
    bound = []
    cache.script(1, {"a": [(0, 1)]})
    with running(cache, sink, bind_thread=lambda: bound.append(threading.current_thread().name)) as builder:
        builder.news([StartedRequest("a", [1], 0)], [])
        deliver(builder, step(1, a=(0, [1])))
    assert sink.closed.is_set()
    assert bound == ["omni-core-builder"]
    assert sink.threads == {"omni-core-feeder"}


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
    assert "step 1 could not be read: RuntimeError: the copy of step 1 failed" in sink.of("a")[0][4]
    assert [entry[0] for entry in sink.of("b")] == ["rows", "end"]
    assert len(report["stage_errors"]) == 1


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
    assert (
        "[(1, 2)] came when it was not open: a flush without it in still_running had ended it"
        in report["failures"]["a"]
    )


@pytest.mark.parametrize("still_running", ["a", b"a", [1], 5])
def test_a_flush_that_is_not_given_a_list_of_ids_ends_nothing(cache, sink, still_running):
    cache.script(1, {"a": [(0, 1)]})
    cache.script(2, {"a": [(1, 2)]})
    with running(cache, sink) as builder:
        builder.news([StartedRequest("a", [1], 0)], [])
        deliver(builder, step(1, a=(0, [1])))
        with pytest.raises(TypeError, match="still_running="):
            builder.flush(BOUND_S, still_running=still_running)
        deliver(builder, step(2, a=(1, [2])))
        builder.flush(BOUND_S, still_running=None)
        assert sink.kinds_of("a") == ["rows", "rows"]
        assert builder.report()["failures"] == {}


def test_a_flush_that_cannot_complete_says_what_it_waits_for(cache, sink):
    cache.script(1, {"a": [(0, 1)]})
    sink.gate.clear()
    with running(cache, sink) as builder:
        builder.news([StartedRequest("a", [1], 0)], [])
        deliver(builder, step(1, a=(0, [1])))
        assert sink.entered.wait(BOUND_S)
        with pytest.raises(FlushTimeoutError, match=r"busy with the sink's accept\(\) for request 'a'"):
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


def test_a_builder_whose_thread_cannot_start_leaves_none_behind(cache, sink):
    class NoMoreThreads(ThreadingRuntime):
        def spawn(self, name, target):
            if name == "omni-core-builder":
                raise RuntimeError("can't start new thread")
            return super().spawn(name, target)

    with pytest.raises(RuntimeError, match="can't start new thread"), running(cache, sink, runtime=NoMoreThreads()):
        pytest.fail("it started")
    assert sink.closed.wait(BOUND_S)


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
