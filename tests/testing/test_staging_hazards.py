# SPDX-License-Identifier: Apache-2.0
"""Staging reused too early: a page claimed while its step is open, or before its rows are in the pool."""

import random

import pytest
import torch
from omni_core_cpu_sim import CpuSimBackend

from omni_core.testing.hazard_checker import WRITER_THREAD, HazardChecker
from omni_core.testing.hazards import HazardError, HazardKind
from omni_core.testing.schedule_strategies import LateThreads
from omni_core.testing.seeded_runtime import SeededRuntime

SEEDS = range(30)
NUM_ROWS = 16
WAIT_S = 10.0


class OnePage:
    """The smallest cache there is: one page, one writer thread, one pool.

    A step's page is free once its step was materialised and its rows are in the pool; `waits_for_consumer` and
    `waits_for_writer` leave one of the two out.
    """

    def __init__(self, runtime, backend, *, waits_for_consumer=True, waits_for_writer=True, frees_before_reading=False):
        self._runtime = runtime
        self._backend = backend
        self._waits_for_consumer = waits_for_consumer
        self._waits_for_writer = waits_for_writer
        self._frees_before_reading = frees_before_reading
        self._lock = runtime.lock("one-page")
        self._changed = runtime.condition(self._lock, "changed")
        self._stream = backend.new_stream("copies")
        self._page = backend.pinned_arena(4 * NUM_ROWS).buffer.view(torch.float32)
        self._pool = torch.zeros(NUM_ROWS)
        self._saved = self._consumed = self._written = 0
        self._copies = []
        self._closed = False
        self._writer = runtime.spawn(WRITER_THREAD, self._write)

    def save_outputs(self, hidden, mm_outputs, *, num_tokens_unpadded, num_tokens_padded):
        with self._lock:
            assert self._changed.wait_for(self._is_free, WAIT_S)
        copied = self._backend.copy_to_host(self._page, hidden.clone(), self._stream)
        with self._lock:
            self._copies.append(copied)
            self._saved += 1
            self._changed.notify_all()
            return self._saved

    def materialize(self, step_id, req_ids, sampled_counts=None):
        self._copies[step_id - 1].synchronize(WAIT_S)
        if self._frees_before_reading:
            self._tell_consumed()
        rows = self._page.clone()
        if not self._frees_before_reading:
            self._tell_consumed()
        return rows

    def close(self):
        with self._lock:
            self._closed = True
            self._changed.notify_all()
        assert self._writer.join(WAIT_S)
        self._backend.close()

    def _is_free(self):
        consumed = self._consumed == self._saved or not self._waits_for_consumer
        return consumed and (self._written == self._saved or not self._waits_for_writer)

    def _tell_consumed(self):
        with self._lock:
            self._consumed += 1
            self._changed.notify_all()

    def _write(self):
        while True:
            with self._lock:
                self._changed.wait_for(lambda: self._written < self._saved or self._closed, None)
                if self._written == self._saved:
                    return
                copied = self._copies[self._written]
            copied.synchronize(WAIT_S)
            self._pool.copy_(self._page)
            with self._lock:
                self._written += 1
                self._changed.notify_all()


def run_steps(seed, *, strategy=None, num_steps=3, **defects):
    """Save steps on the engine thread and materialise each on a builder thread."""
    with SeededRuntime(seed, strategy=strategy) as seeded, HazardChecker(seeded) as checker:
        backend = CpuSimBackend(checker.runtime, observer=checker.device, copy_parts=2)
        page = OnePage(checker.runtime, backend, **defects)
        cache = checker.watch_cache(page)
        for number in range(num_steps):
            rows = torch.full((NUM_ROWS,), float(number))
            step = cache.save_outputs(rows, {}, num_tokens_unpadded=NUM_ROWS, num_tokens_padded=NUM_ROWS)
            builder = checker.runtime.spawn("builder", lambda step=step: cache.materialize(step, ()))
            if not defects:
                assert builder.join(WAIT_S)
        checker.runtime.sleep(1.0)
        page.close()


def staging_hazards(hazards):
    return [hazard for hazard in hazards if hazard.kind is HazardKind.STAGING_REUSED]


def found(late, **defects):
    with pytest.raises(HazardError) as caught:
        run_steps(1, strategy=LateThreads(random.Random(1), late), **defects)
    return staging_hazards(caught.value.hazards)


def test_a_page_with_both_waits_is_never_reused_too_early():
    for seed in SEEDS:
        run_steps(seed)


def test_a_page_reused_while_its_step_is_open_names_both_steps():
    hazard = found(("builder",), waits_for_consumer=False)[0]
    assert "thread 'engine'" in hazard.acting.thread
    assert "queued copy 1 of stream 'copies'" in hazard.acting.doing
    assert hazard.other.doing == "step 1 lies there and is neither materialised nor discarded"
    assert hazard.other.memory == hazard.acting.memory


def test_a_page_reused_before_its_rows_are_in_the_pool_names_both_steps():
    hazard = found((WRITER_THREAD,), waits_for_writer=False)[0]
    assert "queued copy 1 of stream 'copies'" in hazard.acting.doing
    assert hazard.other.doing == "step 1 lies there and its rows are not in the pool"


def test_a_page_freed_before_its_consumer_read_it_names_the_read_and_the_reuse():
    said = None
    for seed in SEEDS:
        try:
            run_steps(seed, frees_before_reading=True)
        except HazardError as error:
            for hazard in staging_hazards(error.hazards):
                if hazard.acting.doing == "aten::clone":
                    said = hazard
    assert said is not None
    assert "thread 'builder'" in said.acting.thread
    assert "over step" in said.other.doing
