# SPDX-License-Identifier: Apache-2.0
"""Small copies made by the thread that queues them: for serving, never by default, and never ahead of older work."""

from __future__ import annotations

import pytest
import torch
from omni_core_cpu_sim import CpuSimBackend

from omni_core.backend import BackendOptionError, ByteCarver, DeviceCopyError, Stream
from omni_core.backend.registry import backend_for_tensor, create_backend
from omni_core.runtime import ThreadingRuntime

WAIT_S = 20.0
LIMIT_BYTES = 64
SMALL = torch.arange(16, dtype=torch.int32)
LARGE = torch.arange(17, dtype=torch.int32)


@pytest.fixture
def serving(make_sim) -> CpuSimBackend:
    sim: CpuSimBackend = make_sim(immediate_copy_bytes=LIMIT_BYTES)
    return sim


def queue(sim: CpuSimBackend, rows: torch.Tensor, stream: Stream):
    place = ByteCarver(sim.pinned_arena(1 << 10).buffer).take(rows.shape, rows.dtype)
    return place, sim.copy_to_host(place, rows, stream)


def test_a_small_copy_is_complete_when_it_has_been_queued(serving: CpuSimBackend) -> None:
    place, done = queue(serving, SMALL, serving.new_stream("copy"))
    assert torch.equal(place, SMALL)
    assert done.query()
    done.synchronize(0.0)


def test_events_around_a_small_copy_are_in_order(serving: CpuSimBackend) -> None:
    stream = serving.new_stream("copy")
    before = stream.record()
    _, done = queue(serving, SMALL, stream)
    after = stream.record()
    assert [event.query() for event in (before, done, after)] == [True, True, True]


def test_a_small_copy_does_not_overtake_a_large_one(serving: CpuSimBackend) -> None:
    stream = serving.new_stream("copy")
    place = ByteCarver(serving.pinned_arena(1 << 10).buffer).take(LARGE.shape, LARGE.dtype)
    with serving.hold_copies():
        serving.copy_to_host(place, LARGE, stream)
        serving.copy_gate.wait_until_waiting(1, WAIT_S)
    # The hold is over, so that only the queue can keep the small copy back; whoever wins, it stands last.
    done = serving.copy_to_host(place[:16], SMALL + 100, stream)
    done.synchronize(WAIT_S)
    assert torch.equal(place, torch.cat((SMALL + 100, LARGE[16:])))


def test_a_small_copy_is_held_with_the_others(serving: CpuSimBackend) -> None:
    stream = serving.new_stream("copy")
    with serving.hold_copies():
        place, done = queue(serving, SMALL, stream)
        assert not done.query()
        assert not torch.equal(place, SMALL)
    done.synchronize(WAIT_S)
    assert torch.equal(place, SMALL)


def test_a_small_copy_that_is_to_fail_fails_at_its_event(serving: CpuSimBackend) -> None:
    stream = serving.new_stream("copy")
    serving.copy_gate.fail_next_copy(RuntimeError("uncorrectable ECC error"))
    place, done = queue(serving, SMALL, stream)
    with pytest.raises(DeviceCopyError, match="uncorrectable ECC error"):
        done.synchronize(WAIT_S)
    assert not torch.equal(place, SMALL)


def test_a_small_copy_that_costs_time_is_left_to_the_stream(make_sim) -> None:
    sim = make_sim(immediate_copy_bytes=LIMIT_BYTES, copy_latency_s=0.05)
    place, done = queue(sim, SMALL, sim.new_stream("copy"))
    assert not done.query()
    done.synchronize(WAIT_S)
    assert torch.equal(place, SMALL)


def test_gradients_do_not_follow_a_small_copy(serving: CpuSimBackend) -> None:
    rows = torch.ones(4, requires_grad=True)
    place, _ = queue(serving, rows, serving.new_stream("copy"))
    assert not place.requires_grad


def test_a_negative_limit_is_refused_by_name(make_sim) -> None:
    with pytest.raises(BackendOptionError, match="immediate_copy_bytes"):
        make_sim(immediate_copy_bytes=-1)


def is_immediate(backend) -> bool:
    stream = backend.new_stream("copy")
    arena = backend.pinned_arena(1 << 10)
    admitted_before = backend.copy_gate.admitted
    backend.copy_to_host(arena.buffer[:64], torch.zeros(64, dtype=torch.uint8), stream).synchronize(WAIT_S)
    return bool(backend.copy_gate.admitted == admitted_before)


def test_only_a_backend_that_serves_an_engine_makes_them() -> None:
    """The gate counts every copy that a worker makes, and none that the caller makes."""
    runtime = ThreadingRuntime()
    serving = backend_for_tensor(torch.empty(0), runtime=runtime, override="cpu_sim")
    asked_otherwise = backend_for_tensor(
        torch.empty(0), runtime=runtime, override="cpu_sim", options={"immediate_copy_bytes": 0}
    )
    simulating = create_backend("cpu_sim", runtime=runtime)
    try:
        assert [is_immediate(backend) for backend in (serving, asked_otherwise, simulating)] == [True, False, False]
    finally:
        for backend in (serving, asked_otherwise, simulating):
            backend.close()
