# SPDX-License-Identifier: Apache-2.0
"""In every order of engine, builder and feeder: each computed row comes once or is reported missing, each request ends
once, and an engine that is not to wait never waits for the sink."""

from collections import Counter
from random import Random

import numpy as np
import pytest
import torch

from omni_core.integrations.vllm.delivery.builder import BuiltStep, StageBuilder, StartedRequest
from omni_core.integrations.vllm.request_ids import client_request
from omni_core.prefix_cache.config import HIDDEN_KEY
from omni_core.prefix_cache.outputs import RequestRows, StageCacheOutputs
from omni_core.settings.stage_settings import OnSlowSink
from omni_core.sinks.base import RequestEnd, StageSink
from omni_core.testing.seeded_runtime import SeededRuntime

BOUND_S = 1000.0
PROMPT_TOKENS = 3
NUM_STEPS = 12


class OwingCache:
    """Delivers a step's rows, and with them what steps discarded before owe its requests. A row is its position."""

    def __init__(self, runtime):
        self._lock = runtime.lock("owing-cache")
        self._planned = {}
        self._owed = {}
        self.unreleased = 0

    def save(self, step_id, runs):
        with self._lock:
            self._planned[step_id] = {req_id: [*self._owed.pop(req_id, []), one] for req_id, one in runs.items()}

    def discard(self, step_id):
        with self._lock:
            self._owed.update(self._planned.pop(step_id))

    def materialize(self, step_id, req_ids, sampled_counts=None):
        served = {}
        with self._lock:
            self.unreleased += 1
            planned = self._planned.pop(step_id)
        for req_id in req_ids:
            positions = [float(p) for start, stop in planned[req_id] for p in range(start, stop)]
            rows = {HIDDEN_KEY: torch.tensor(positions)[:, None]}
            served[req_id] = RequestRows(req_id, tuple(planned[req_id]), rows)
        return StageCacheOutputs(step_id, served, {}, self._release)

    def _release(self):
        with self._lock:
            self.unreleased -= 1


class SlowSink(StageSink):
    """Takes some virtual time for every call, and raises now and then."""

    def __init__(self, runtime, random):
        self._runtime, self._random = runtime, random
        self.rows, self.ends, self.raised = {}, {}, set()
        self.closed = 0

    def accept(self, delivery):
        self._runtime.sleep(self._random.choice([0, 0.1, 5]))
        assert delivery.req_id not in self.ends
        assert delivery.req_id not in self.raised
        if self._random.random() < 0.05:
            self.raised.add(delivery.req_id)
            raise SystemExit(1)
        values = delivery.rows[HIDDEN_KEY].flatten().tolist()
        assert values == [p for start, stop in delivery.ranges for p in range(start, stop)]
        assert delivery.token_ids.tolist() == [100 + value for value in values]
        self.rows.setdefault(delivery.req_id, []).extend(values)

    def finish(self, end):
        self._runtime.sleep(self._random.choice([0, 1]))
        assert end.req_id not in self.ends
        self.ends[end.req_id] = end

    def close(self):
        self.closed += 1


def built(step_id, runs):
    lengths = [stop - start for start, stop in runs.values()]
    positions = np.concatenate([np.arange(start, stop) for start, stop in runs.values()])
    return BuiltStep(step_id, tuple(runs), np.concatenate(([0], np.cumsum(lengths))), positions, positions + 100)


def drive(builder, cache, random):
    """Twelve steps of up to three requests that come and go; how many tokens of each were computed."""
    computed, running = Counter(), []
    for step_id in range(NUM_STEPS):
        ended = [req_id for req_id in running if random.random() < 0.2]
        running = [req_id for req_id in running if req_id not in ended]
        started = [f"r{step_id}-0000000{len(running) + 1}"] if len(running) < 3 else []
        prompt = [100 + position for position in range(PROMPT_TOKENS)]
        builder.news([StartedRequest(req_id, prompt, 0) for req_id in started], ended)
        running += started
        runs = {}
        for req_id in running:
            count = random.choice([1, 2, PROMPT_TOKENS]) if computed[req_id] < PROMPT_TOKENS else 1
            runs[req_id] = (computed[req_id], computed[req_id] + count)
            computed[req_id] += count
        has_room = builder.room_for_step()
        cache.save(step_id, runs)
        if has_room:
            builder.submit(built(step_id, runs))
        else:
            cache.discard(step_id)
            builder.give_up(built(step_id, runs))
    return computed


@pytest.mark.parametrize("on_slow_sink", OnSlowSink)
@pytest.mark.parametrize("seed", range(40))
def test_each_row_comes_once_or_is_missed_and_each_request_ends_once(seed, on_slow_sink):
    random = Random(seed)
    with SeededRuntime(seed, stall_limit_s=2 * BOUND_S) as runtime:
        cache, sink = OwingCache(runtime), SlowSink(runtime, random)
        sink.rows_may_wait = random.random() < 0.5
        builder = StageBuilder(
            cache,
            sink,
            runtime=runtime,
            client_request_of=client_request,
            max_open_steps=random.choice([1, 3]),
            room_timeout_s=random.choice([0.5, 50]),
            on_slow_sink=on_slow_sink,
            sink_queue_bytes=random.choice([1, 4000, 1 << 20]),
        )
        before_s = runtime.monotonic_s()
        computed = drive(builder, cache, random)
        if on_slow_sink is OnSlowSink.SKIP:
            assert runtime.monotonic_s() == before_s  # time passes only while every thread waits
        builder.flush(BOUND_S)
        report = builder.report()
        assert builder.close(BOUND_S)
    assert sink.closed == 1
    assert cache.unreleased == 0
    assert (report["requests_open"], report["sink_queue_bytes"], report["entries_waiting"]) == (0, 0, 0)
    for req_id, count in computed.items():
        if req_id in sink.raised:
            assert req_id in report["sink_errors"]
            assert req_id not in sink.ends
        elif req_id in sink.ends:
            end = sink.ends[req_id]
            missing = [position for start, stop in end.missing for position in range(start, stop)]
            assert sorted([*sink.rows.get(req_id, []), *missing]) == list(range(max(count, PROMPT_TOKENS)))
            assert (end.end is RequestEnd.FAILED) == (req_id in report["failures"])
            assert end.end is not RequestEnd.FINISHED or count >= PROMPT_TOKENS
        else:
            pytest.fail(f"the sink never heard of the end of {req_id}")
