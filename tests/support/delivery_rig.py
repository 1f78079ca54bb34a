# SPDX-License-Identifier: Apache-2.0
"""A builder between a scripted cache and a sink that can be held back, or made to raise."""

import threading
from contextlib import contextmanager

import numpy as np
import torch

from omni_core.integrations.vllm.delivery.builder import BuiltStep, StageBuilder
from omni_core.integrations.vllm.request_ids import ClientRequest
from omni_core.prefix_cache.config import HIDDEN_KEY
from omni_core.prefix_cache.outputs import RequestRows, StageCacheOutputs
from omni_core.runtime import ThreadingRuntime
from omni_core.settings.stage_settings import OnSlowSink
from omni_core.sinks.base import StageSink

BOUND_S = 20.0
AT_ONCE_S = 0.05
ROW = torch.tensor([[1.0]])


class ScriptedCache:
    """Answers `materialize` from a script; a request's row at a position is the position itself."""

    def __init__(self):
        self.outputs = {}
        self.released = []

    def script(self, step_id, served, failed=None):
        self.outputs[step_id] = (served, failed or {})

    def materialize(self, step_id, req_ids, sampled_counts=None):
        served, failed = self.outputs[step_id]
        if isinstance(served, BaseException):
            raise served
        rows = {
            req_id: RequestRows(req_id, tuple(ranges), {HIDDEN_KEY: rows_at(ranges)})
            for req_id, ranges in served.items()
        }
        return StageCacheOutputs(step_id, rows, failed, lambda: self.released.append(step_id))


class EndlessCache:
    """Serves each request of step `n` the row at position `n`, and counts outputs that were not released."""

    def __init__(self):
        self.unreleased = 0

    def materialize(self, step_id, req_ids, sampled_counts=None):
        self.unreleased += 1
        rows = {req_id: RequestRows(req_id, ((step_id, step_id + 1),), {HIDDEN_KEY: ROW}) for req_id in req_ids}
        return StageCacheOutputs(step_id, rows, {}, self._release)

    def _release(self):
        self.unreleased -= 1


class RecordingSink(StageSink):
    """Writes down what it is told; `gate` holds `accept` back, `broken` says what a call raises."""

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
        self._maybe_raise("close", None)
        self.closed.set()

    def of(self, req_id):
        return [entry for entry in self.told if entry[1] == req_id]

    def kinds_of(self, req_id):
        return [entry[0] for entry in self.of(req_id)]

    def _maybe_raise(self, call, req_id):
        error = self.broken.get((call, req_id))
        if error is not None:
            raise error


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


@contextmanager
def running(cache, sink, **options):
    defaults = {
        "client_request_of": lambda req_id: ClientRequest(f"client of {req_id}", None),
        "max_open_steps": 2,
        "room_timeout_s": BOUND_S,
        "runtime": ThreadingRuntime(),
        "on_slow_sink": OnSlowSink.SKIP,
        "sink_queue_bytes": 256 << 20,
    }
    builder = StageBuilder(cache, sink, **(defaults | options))
    try:
        yield builder
    finally:
        if isinstance(sink, RecordingSink):
            sink.gate.set()
        assert builder.close(BOUND_S)


def deliver(builder, one):
    assert builder.room_for_step()
    builder.submit(one)
