# SPDX-License-Identifier: Apache-2.0
"""What the simulator charges: simulated time on the runtime's clock, and nothing on the caller's side of a copy."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from omni_core_cpu_sim import CpuSimBackend

from omni_core.backend import BackendOptionError, ByteCarver
from omni_core.runtime import Condition, Lock, ThreadHandle, ThreadingRuntime

WAIT_S = 20.0


class WatchedRuntime(ThreadingRuntime):
    """Notes what is asked of it; time passes at once."""

    def __init__(self) -> None:
        self.slept_s: list[float] = []
        self.at_checkpoint: Callable[[str], None] = lambda name: None

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)

    def checkpoint(self, name: str) -> None:
        self.at_checkpoint(name)


def page_of(sim: CpuSimBackend, rows: torch.Tensor) -> torch.Tensor:
    return ByteCarver(sim.pinned_arena(1 << 16).buffer).take(rows.shape, rows.dtype)


def test_a_copy_without_costs_takes_no_simulated_time(make_sim) -> None:
    runtime = WatchedRuntime()
    sim, rows = make_sim(runtime), torch.arange(100.0)
    sim.copy_to_host(page_of(sim, rows), rows, sim.new_stream("copy")).synchronize(WAIT_S)
    assert runtime.slept_s == []


def test_latency_is_paid_per_copy_and_bandwidth_per_byte(make_sim) -> None:
    runtime = WatchedRuntime()
    sim = make_sim(runtime, copy_latency_s=0.25, copy_bandwidth_bytes_per_s=800.0)
    small, large, stream = torch.arange(100.0), torch.arange(1000.0), sim.new_stream("copy")
    sim.copy_to_host(page_of(sim, small), small, stream)
    sim.copy_to_host(page_of(sim, large), large, stream).synchronize(WAIT_S)
    assert runtime.slept_s == [0.25, 400 / 800, 0.25, 4000 / 800]


def test_the_bytes_are_not_there_before_their_time_has_passed(make_sim) -> None:
    seen: list[torch.Tensor] = []

    class Peeking(WatchedRuntime):
        def sleep(self, seconds: float) -> None:
            seen.append(destination.clone())

    sim, rows = make_sim(Peeking(), copy_latency_s=1.0, copy_bandwidth_bytes_per_s=1.0), torch.arange(100.0)
    destination = page_of(sim, rows)
    sim.copy_to_host(destination, rows, sim.new_stream("copy")).synchronize(WAIT_S)
    assert len(seen) == 2
    assert all(bool(before.isnan().all()) for before in seen)
    assert torch.equal(destination, rows)


def test_a_copy_in_parts_shows_a_half_written_page_at_its_checkpoints(make_sim) -> None:
    written: list[tuple[str, int]] = []
    runtime = WatchedRuntime()
    sim, rows = make_sim(runtime, copy_parts=4, copy_bandwidth_bytes_per_s=40.0), torch.arange(10.0)
    destination = page_of(sim, rows)

    def note_progress(name: str) -> None:
        written.append((name.rpartition(".")[2], int((~destination.isnan()).sum())))

    runtime.at_checkpoint = note_progress
    done = sim.copy_to_host(destination, rows, sim.new_stream("copy"))
    done.synchronize(WAIT_S)
    assert [count for name, count in written if name == "before_part"] == [0, 2, 5, 7]
    assert [count for name, count in written if name == "after_part"] == [2, 5, 7, 10]
    assert sum(runtime.slept_s) == pytest.approx(1.0)
    assert torch.equal(destination, rows)


def test_a_copy_of_fewer_elements_than_parts_is_whole(make_sim) -> None:
    sim, rows = make_sim(copy_parts=7), torch.tensor([3.0])
    destination = page_of(sim, rows)
    sim.copy_to_host(destination, rows, sim.new_stream("copy")).synchronize(WAIT_S)
    assert torch.equal(destination, rows)


def test_pinning_takes_time_per_byte(make_sim) -> None:
    runtime = WatchedRuntime()
    make_sim(runtime, pin_seconds_per_byte=0.5).pinned_arena(64)
    assert runtime.slept_s == [32.0]


class CountedLock:
    def __init__(self, inner: Lock, runtime: LockCountingRuntime) -> None:
        self.inner = inner
        self._runtime = runtime

    def __enter__(self) -> bool:
        if threading.get_ident() == self._runtime.counted_thread:
            self._runtime.locks_taken += 1
        return self.inner.__enter__()

    def __exit__(self, *exc_info: object) -> None:
        self.inner.__exit__(*exc_info)


class LockCountingRuntime(ThreadingRuntime):
    """Counts the locks its own test's thread takes, and everything that is made."""

    def __init__(self) -> None:
        self.counted_thread = threading.get_ident()
        self.locks_taken = 0
        self.things_made = 0

    def lock(self, name: str) -> Lock:
        self.things_made += 1
        return CountedLock(super().lock(name), self)

    def condition(self, lock: Lock, name: str) -> Condition:
        assert isinstance(lock, CountedLock)
        self.things_made += 1
        return super().condition(lock.inner, name)

    def spawn(self, name: str, target: Callable[[], None]) -> ThreadHandle:
        self.things_made += 1
        return super().spawn(name, target)


def test_a_step_takes_one_lock_per_call_and_makes_nothing(make_sim) -> None:
    runtime = LockCountingRuntime()
    sim, rows = make_sim(runtime), torch.arange(100.0)
    stream, destination = sim.new_stream("copy"), page_of(sim, rows)
    ring = sim.snapshot_ring(1, 4096, torch.device("cpu"))
    allocations, made = (sim.pinned_allocations, sim.device_allocations), runtime.things_made
    for _ in range(20):
        before = runtime.locks_taken
        clone = sim.snapshot(rows, ring.slot(0))
        assert runtime.locks_taken == before
        done = sim.copy_to_host(destination, clone, stream)
        assert runtime.locks_taken == before + 1
        recorded = stream.record()
        assert runtime.locks_taken == before + 2
        recorded.synchronize(WAIT_S)
        before = runtime.locks_taken
        assert done.query()
        done.synchronize(WAIT_S)
        assert runtime.locks_taken == before
    assert (sim.pinned_allocations, sim.device_allocations) == allocations == (1, 1)
    assert runtime.things_made == made


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("copy_latency_s", -1.0),
        ("copy_latency_s", float("nan")),
        ("copy_bandwidth_bytes_per_s", float("inf")),
        ("copy_bandwidth_bytes_per_s", "fast"),
        ("copy_parts", 0),
        ("copy_parts", 1.5),
        ("copy_parts", True),
        ("pin_seconds_per_byte", -0.1),
        ("max_pinned_bytes", -1),
        ("max_pin_bytes", 0),
        ("close_timeout_s", True),
    ],
)
def test_an_option_out_of_range_is_named_with_its_value(option: str, value: object) -> None:
    with pytest.raises(BackendOptionError, match=rf"cpu_sim: {option}={value!r} must be"):
        CpuSimBackend(ThreadingRuntime(), **{option: value})
