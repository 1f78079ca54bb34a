# SPDX-License-Identifier: Apache-2.0
"""A sink that shows nothing of a request before its end may get its rows a little later; nobody waits for them."""

import pytest
from delivery_rig import BOUND_S, EndlessCache, RecordingSink, deliver, running, step

from omni_core.integrations.vllm.delivery.builder import StartedRequest
from omni_core.integrations.vllm.delivery.linger import LINGER_S
from omni_core.testing.seeded_runtime import SeededRuntime

NO_TIME_S = 1e-6
MANY_STEPS = 12


class PatientSink(RecordingSink):
    """One that lets its rows wait."""

    rows_may_wait = True

    def rows_of(self, req_id):
        return [entry[2] for entry in self.of(req_id) if entry[0] == "rows"]


@pytest.fixture
def runtime():
    """Time passes on it only while every thread waits."""
    with SeededRuntime(0, stall_limit_s=2 * BOUND_S) as made:
        yield made


@pytest.fixture
def patient_sink():
    return PatientSink()


@pytest.fixture
def builder(runtime, patient_sink):
    """Request `a` has started, and the threads have nothing to do."""
    with running(EndlessCache(), patient_sink, runtime=runtime, max_open_steps=3) as made:
        made.news([StartedRequest("a", [1], 0)], [])
        runtime.sleep(3 * LINGER_S)
        yield made


def decode(runtime, builder, first, count, seconds_each=NO_TIME_S):
    for step_id in range(first, first + count):
        deliver(builder, step(step_id, a=(step_id, [7])))
        runtime.sleep(seconds_each)


def test_a_step_alone_waits_for_others_and_then_comes(runtime, builder, patient_sink):
    decode(runtime, builder, 0, 1)
    assert patient_sink.rows_of("a") == []
    runtime.sleep(3 * LINGER_S)
    assert patient_sink.rows_of("a") == [0]


def test_many_steps_come_before_any_has_waited_that_long(runtime, builder, patient_sink):
    before_s = runtime.monotonic_s()
    decode(runtime, builder, 0, MANY_STEPS)
    assert runtime.monotonic_s() - before_s < LINGER_S
    assert patient_sink.rows_of("a") != []


def test_slow_steps_never_wait_longer(runtime, builder, patient_sink):
    decode(runtime, builder, 0, MANY_STEPS, LINGER_S)
    waiting = MANY_STEPS - len(patient_sink.rows_of("a"))
    assert waiting <= 3


def test_the_engine_never_waits_for_a_builder_that_waits_for_more(runtime, builder):
    before_s = runtime.monotonic_s()
    for step_id in range(MANY_STEPS):
        deliver(builder, step(step_id, a=(step_id, [7])))
    assert runtime.monotonic_s() == before_s


@pytest.mark.parametrize("num_held", [0, 1, 2])
def test_neither_does_it_while_steps_wait_for_their_tokens(runtime, builder, num_held):
    before_s = runtime.monotonic_s()
    for step_id in range(MANY_STEPS):
        assert builder.room_for_step(num_held=num_held)
        builder.submit(step(step_id, a=(step_id, [7])))
    assert runtime.monotonic_s() == before_s


def test_a_request_that_ends_is_whole_at_once(runtime, builder, patient_sink):
    decode(runtime, builder, 0, 1)
    builder.news([], ["a"])
    runtime.sleep(NO_TIME_S)
    assert patient_sink.kinds_of("a") == ["rows", "end"]


@pytest.mark.parametrize("still_running", [None, ["a"]])
def test_a_flush_that_ends_nothing_waits_for_no_more(runtime, builder, patient_sink, still_running):
    decode(runtime, builder, 0, 1)
    before_s = runtime.monotonic_s()
    builder.flush(BOUND_S, still_running)
    assert runtime.monotonic_s() == before_s
    assert patient_sink.rows_of("a") == [0]


def test_a_queue_that_is_half_full_does_not_wait(runtime, patient_sink):
    with running(EndlessCache(), patient_sink, runtime=runtime, sink_queue_bytes=1, max_open_steps=1) as builder:
        builder.news([StartedRequest("a", [1], 0)], [])
        runtime.sleep(3 * LINGER_S)
        decode(runtime, builder, 0, 1)
        assert patient_sink.rows_of("a") == [0]


def test_close_waits_for_no_more(runtime, patient_sink):
    with running(EndlessCache(), patient_sink, runtime=runtime) as builder:
        builder.news([StartedRequest("a", [1], 0)], [])
        runtime.sleep(3 * LINGER_S)
        decode(runtime, builder, 0, 1)
        before_s = runtime.monotonic_s()
        assert builder.close(BOUND_S)
        assert runtime.monotonic_s() == before_s
    assert patient_sink.kinds_of("a") == ["rows", "end"]


def test_rows_that_must_not_wait_do_not(runtime):
    sink = RecordingSink()
    with running(EndlessCache(), sink, runtime=runtime, max_open_steps=3) as builder:
        builder.news([StartedRequest("a", [1], 0)], [])
        runtime.sleep(3 * LINGER_S)
        decode(runtime, builder, 0, 1)
        assert sink.kinds_of("a") == ["rows"]
