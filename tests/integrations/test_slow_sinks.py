# SPDX-License-Identifier: Apache-2.0
"""A slow or stuck sink costs rows at most, never a step of the engine, and never memory without bound."""

import logging
import threading

import pytest
from delivery_rig import AT_ONCE_S, BOUND_S, EndlessCache, deliver, running, step

from omni_core.integrations.vllm.delivery.builder import StartedRequest
from omni_core.integrations.vllm.errors import FlushTimeoutError
from omni_core.prefix_cache.config import HIDDEN_KEY
from omni_core.prefix_cache.errors import HitRowsAbsentError
from omni_core.runtime import ThreadingRuntime
from omni_core.settings.stage_settings import OnSlowSink
from omni_core.sinks.base import RequestEnd
from omni_core.sinks.errors import UnknownRequestError
from omni_core.sinks.memory import MemorySink

FULL_WITH_ONE_STEP_BYTES = 1


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


def await_builder(builder):
    """Wait until the builder's own work is done, whatever the sink does."""
    clock = ThreadingRuntime()
    deadline_s = clock.monotonic_s() + BOUND_S
    while builder.report()["entries_waiting"]:
        assert clock.monotonic_s() < deadline_s
        clock.sleep(0.001)


def stuck_in_the_first_step(builder, sink):
    """Request `a` is at its second token; the sink holds its first row."""
    sink.gate.clear()
    builder.news([StartedRequest("a", [1], 0)], [])
    deliver(builder, step(1, a=(0, [1])))
    assert sink.entered.wait(BOUND_S)


def test_the_engine_never_waits_for_a_sink_that_is_stuck_for_ever_and_memory_stays_bounded(sink):
    waits = WaitsOfTheEngine()
    cache = EndlessCache()
    queue_bytes = 64 << 10
    sink.gate.clear()
    with running(cache, sink, runtime=waits, sink_queue_bytes=queue_bytes, max_open_steps=3) as builder:
        submitted = 0
        for number in range(10_000):
            ended = [f"r{number - 3}"] if number >= 3 else []
            builder.news([StartedRequest(f"r{number}", [5], 0)], ended)
            one = step(number, **{f"r{number}": (number, [5])})
            if builder.room_for_step():
                builder.submit(one)
                submitted += 1
                await_builder(builder)
            else:
                builder.give_up(one)
        assert waits.count == 0
        await_builder(builder)
        report = builder.report()
        assert 0 < submitted < 100
        assert report["steps_given_up"] == 10_000 - submitted
        assert report["sink_queue_peak_bytes"] < 2 * queue_bytes
        assert report["sink_queue_entries"] < 1024 + 200
        assert report["entries_waiting"] == report["steps_open"] == 0
        assert report["requests_open"] == 3
        assert len(report["failures"]) <= 1024
        assert report["requests_failed"] == 9_997 - submitted
        assert report["last_words_dropped"] > 8_000
        assert (report["stalls"], report["sink_stalls"]) == (1, 1)
        assert cache.unreleased == submitted


def test_a_full_queue_is_told_of_at_once_once_in_the_log_and_counted_once_per_stall(cache, sink, caplog):
    waits = WaitsOfTheEngine()
    cache.script(1, {"a": [(0, 1)]})
    cache.script(4, {"a": [(1, 4)]})
    with (
        caplog.at_level(logging.WARNING),
        running(cache, sink, runtime=waits, sink_queue_bytes=FULL_WITH_ONE_STEP_BYTES) as builder,
    ):
        stuck_in_the_first_step(builder, sink)
        waits.count = 0
        for number, token in ((2, 22), (3, 33)):
            assert not builder.room_for_step()
            builder.give_up(step(number, a=(number - 1, [token])))
        assert waits.count == 0
        assert [record.message.partition(";")[0] for record in caplog.records] == ["the sink does not keep up"]
        sink.gate.set()
        builder.flush(BOUND_S, still_running=["a"])
        deliver(builder, step(4, a=(3, [44])))
        builder.flush(BOUND_S)
        report = builder.report()
    assert sink.told[1] == ("rows", "a", 4, ((1, 4),), {HIDDEN_KEY: [1.0, 2.0, 3.0]}, [22, 33, 44])
    assert sink.told[2] == ("end", "a", RequestEnd.FLUSHED, (), None)
    assert (report["steps_given_up"], report["stalls"], report["sink_stalls"]) == (2, 1, 1)


def test_a_second_stall_is_counted_and_logged_again(cache, sink, caplog):
    for number in (1, 2):
        cache.script(number, {"a": [(number - 1, number)]})
    with caplog.at_level(logging.WARNING), running(cache, sink, sink_queue_bytes=1) as builder:
        builder.news([StartedRequest("a", [1], 0)], [])
        for number in (1, 2):
            sink.gate.clear()
            sink.entered.clear()
            deliver(builder, step(number, a=(number - 1, [number])))
            assert sink.entered.wait(BOUND_S)
            assert not builder.room_for_step()
            assert builder.report()["sink_stalls"] == number == len(caplog.records)
            sink.gate.set()
            builder.flush(BOUND_S, still_running=["a"])


def test_a_step_bigger_than_the_queue_passes(cache, sink):
    cache.script(1, {"a": [(0, 5000)]})
    with running(cache, sink, sink_queue_bytes=FULL_WITH_ONE_STEP_BYTES) as builder:
        builder.news([StartedRequest("a", list(range(5000)), 0)], [])
        deliver(builder, step(1, a=(0, list(range(5000)))))
        builder.flush(BOUND_S)
        assert builder.report()["sink_queue_peak_bytes"] > 5000
    assert sink.told[-1] == ("end", "a", RequestEnd.FLUSHED, (), None)


def test_rows_stay_valid_until_the_sink_took_the_last_of_their_step(cache, sink):
    cache.script(1, {"a": [(0, 1)], "b": [(0, 1)]})
    cache.script(2, {"b": [(1, 2)]})
    with running(cache, sink) as builder:
        builder.news([StartedRequest("b", [1], 0)], [])
        stuck = step(1, a=(0, [1]), b=(0, [1]))
        sink.gate.clear()
        builder.news([StartedRequest("a", [1], 0)], [])
        deliver(builder, stuck)
        deliver(builder, step(2, b=(1, [2])))
        assert sink.entered.wait(BOUND_S)
        with pytest.raises(FlushTimeoutError, match="of the sink's queue"):
            builder.flush(AT_ONCE_S, still_running=None)
        assert cache.released == []
        sink.gate.set()
        builder.flush(BOUND_S)
    assert cache.released == [1, 2]


def test_an_engine_that_is_to_wait_loses_no_row_to_a_slow_sink(sink):
    cache = EndlessCache()
    with running(
        cache, sink, on_slow_sink=OnSlowSink.WAIT, sink_queue_bytes=FULL_WITH_ONE_STEP_BYTES, max_open_steps=1
    ) as builder:
        builder.news([StartedRequest("a", [0], 0)], [])
        for number in range(200):
            assert builder.room_for_step()
            builder.submit(step(number, a=(number, [number])))
        builder.flush(BOUND_S)
        assert builder.report()["steps_given_up"] == 0
    assert [entry[3] for entry in sink.told[:-1]] == [((number, number + 1),) for number in range(200)]
    assert sink.told[-1] == ("end", "a", RequestEnd.FLUSHED, (), None)


def test_an_engine_that_is_to_wait_does_so_in_vain_only_once_until_the_sink_moves(cache, sink):
    waits = WaitsOfTheEngine()
    for number in (1, 2):
        cache.script(number, {"a": [(number - 1, number)]})
    options = {"on_slow_sink": OnSlowSink.WAIT, "room_timeout_s": AT_ONCE_S, "sink_queue_bytes": 1, "runtime": waits}
    with running(cache, sink, **options) as builder:
        stuck_in_the_first_step(builder, sink)
        waits.count = 0
        assert [builder.room_for_step() for _ in range(3)] == [False, False, False]
        assert waits.count == 1
        sink.gate.set()
        builder.flush(BOUND_S, still_running=["a"])
        sink.gate.clear()
        sink.entered.clear()
        deliver(builder, step(2, a=(1, [2])))
        assert sink.entered.wait(BOUND_S)
        waits.count = 0
        assert not builder.room_for_step()
        assert waits.count == 1


def test_steps_that_bring_no_rows_do_not_wait_behind_a_stuck_sink(cache, sink):
    cache.script(1, {"a": [(0, 1)]})
    lost = HitRowsAbsentError("b", "hit [0, 4) has no rows")
    for number in range(2, 500):
        cache.script(number, {}, {"b": lost})
    with running(cache, sink) as builder:
        stuck_in_the_first_step(builder, sink)
        builder.news([StartedRequest("b", [1, 2, 3, 4, 5], 4)], [])
        for number in range(2, 500):
            deliver(builder, step(number, b=(2 + number, [7])))
        await_builder(builder)
        assert cache.released == list(range(2, 500))
        assert builder.report()["sink_queue_entries"] == 2  # the step of a, and the last word on b


class StuckCache(EndlessCache):
    """Holds `materialize` back until `gate` is set."""

    def __init__(self):
        super().__init__()
        self.gate, self.entered = threading.Event(), threading.Event()

    def materialize(self, step_id, req_ids, sampled_counts=None):
        self.entered.set()
        assert self.gate.wait(BOUND_S)
        return super().materialize(step_id, req_ids, sampled_counts)


def test_a_builder_stuck_in_the_cache_is_waited_for_once_and_what_waits_for_it_is_bounded(sink):
    waits = WaitsOfTheEngine()
    cache = StuckCache()
    options = {"max_open_steps": 1, "room_timeout_s": AT_ONCE_S, "runtime": waits, "max_waiting_entries": 100}
    with running(cache, sink, **options) as builder:
        builder.news([StartedRequest("a", [0], 0)], [])
        deliver(builder, step(0, a=(0, [0])))
        assert cache.entered.wait(BOUND_S)
        waits.count = 0
        for number in range(1, 1000):
            builder.news([StartedRequest(f"r{number}", [1], 0)], [])
            assert not builder.room_for_step()
            builder.give_up(step(number, a=(number, [number])))
            assert builder.report()["entries_waiting"] <= 103
        assert waits.count == 1
        cache.gate.set()
        builder.flush(BOUND_S)
        report = builder.report()
        assert report["overruns"] > 0
        assert "fell 100 entries behind" in report["failures"]["a"]
        assert report["requests_open"] == 0
        builder.news([StartedRequest("later", [7], 0)], [])
        deliver(builder, step(1000, later=(0, [7])))
        builder.flush(BOUND_S)
    assert sink.of("a")[-1][2] is RequestEnd.FAILED
    assert sink.kinds_of("later") == ["rows", "end"]


def test_a_flush_that_was_begun_before_an_overrun_is_done_after_it(sink):
    cache = StuckCache()
    with running(cache, sink, max_open_steps=1, max_waiting_entries=10) as builder:
        builder.news([StartedRequest("a", [0], 0)], [])
        deliver(builder, step(0, a=(0, [0])))
        assert cache.entered.wait(BOUND_S)
        ticket = builder.begin_flush(None)
        for number in range(1, 30):
            builder.news([StartedRequest(f"r{number}", [1], 0)], [])
        assert builder.report()["overruns"] > 0
        assert not builder.wait_flushed(ticket, AT_ONCE_S)
        cache.gate.set()
        assert builder.wait_flushed(ticket, BOUND_S)


def test_what_waits_for_a_stuck_builder_is_bounded_in_tokens_too(sink):
    cache = StuckCache()
    options = {"max_open_steps": 1, "room_timeout_s": AT_ONCE_S, "max_waiting_tokens": 10_000}
    with running(cache, sink, **options) as builder:
        builder.news([StartedRequest("a", [0], 0)], [])
        deliver(builder, step(0, a=(0, [0])))
        assert cache.entered.wait(BOUND_S)
        for number in range(1, 10):
            builder.give_up(step(number, a=(1000 * number, [5] * 1000)))
        builder.news([StartedRequest("b", [7] * 1000, 0)], [])
        assert builder.report()["overruns"] == 0
        assert builder.report()["entries_waiting"] == 11
        builder.give_up(step(10, a=(10_000, [5])))
        report = builder.report()
        assert report["overruns"] == 1
        assert report["entries_waiting"] == 4  # the step in the cache, b's start, the failure of all, the last entry
        cache.gate.set()
        builder.flush(BOUND_S)
        assert "fell 10000 tokens behind" in builder.report()["failures"]["a"]
        assert builder.report()["requests_open"] == 0
        builder.news([StartedRequest("later", [7], 0)], [])
        deliver(builder, step(11, later=(0, [7])))
        builder.flush(BOUND_S)
    assert sink.of("a")[-1][2] is RequestEnd.FAILED
    assert sink.kinds_of("later") == ["rows", "end"]


@pytest.mark.parametrize("overruns", [1, 3])
def test_a_request_whose_start_is_dropped_in_an_overrun_fails_for_that_reason(sink, overruns):
    cache = StuckCache()
    with running(cache, sink, max_open_steps=3, max_waiting_entries=5) as builder:
        builder.news([StartedRequest("a", [0], 0)], [])
        deliver(builder, step(0, a=(0, [0])))
        assert cache.entered.wait(BOUND_S)
        builder.news([StartedRequest("late", [1, 2, 3], 0)], [])
        deliver(builder, step(1, late=(0, [1])))
        for number in range(100, 200):
            if builder.report()["overruns"] < overruns:
                builder.give_up(step(number, a=(number, [2])))
        assert builder.report()["overruns"] == overruns
        cache.gate.set()
        builder.flush(BOUND_S, None)
        deliver(builder, step(2, late=(2, [3])))
        builder.news([], ["late"])
        builder.flush(BOUND_S)
        report = builder.report()
        assert set(report["failures"]) == {"a", "late"}
        assert all("fell 5 entries behind" in reason for reason in report["failures"].values())
        assert report["requests_failed"] == 2
    assert [entry[2] for entry in sink.of("late") if entry[0] == "end"] == [RequestEnd.FAILED]


def test_tokens_that_no_longer_wait_for_the_builder_are_not_counted(sink):
    with running(EndlessCache(), sink, max_waiting_tokens=100) as builder:
        for number in range(50):
            builder.news([StartedRequest(f"r{number}", [7] * 60, 0)], [f"r{number - 1}"])
            builder.give_up(step(number, **{f"r{number}": (0, [7] * 39)}))
            builder.flush(BOUND_S, still_running=None)
        assert builder.report()["overruns"] == 0


def test_a_full_sink_costs_the_request_that_finds_no_room_and_names_it():
    sink = MemorySink(max_bytes=10_000)
    with running(EndlessCache(), sink, whole_prefix=False) as builder:
        builder.news([StartedRequest("long", None, 0), StartedRequest("short", None, 0)], [])
        for number in range(10):
            deliver(builder, step(number, long=(number, [5])))
            builder.flush(BOUND_S, still_running=None)
        deliver(builder, step(10, short=(10, [6])))
        builder.news([], ["long", "short"])
        builder.flush(BOUND_S)
        report = builder.report()
    assert "above max_bytes=10000; all its rows are dropped" in report["sink_errors"]["long"]
    assert list(report["sink_errors"]) == ["long"]
    assert sink.request("short").positions.tolist() == [10]
    with pytest.raises(UnknownRequestError, match="'long' has no rows: the sink was full"):
        sink.request("long")
