# SPDX-License-Identifier: Apache-2.0
"""Events of `cuda` and `npu`: waits that end and sleep, order between streams, failures, and what is never called."""

from __future__ import annotations

import time

import pytest
import torch
from fake_accelerator.backends import VENDORS, Vendor
from fake_accelerator.rig import SHORT_S, WAIT_S, FakeRig, step_rows

from omni_core.backend import DeviceCopyError, DeviceWaitTimeoutError
from omni_core.backend.accelerator import FIRST_PAUSE_S, LONGEST_PAUSE_S
from omni_core.runtime import ThreadingRuntime


class SleepCounter(ThreadingRuntime):
    """Notes every sleep, on a clock that only sleeps move; a real one is at most a tenth of a millisecond."""

    def __init__(self) -> None:
        self.slept_s: list[float] = []

    def monotonic_s(self) -> float:
        return sum(self.slept_s)

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        time.sleep(min(seconds, 1e-4))


@pytest.mark.parametrize("vendor", VENDORS)
def test_a_wait_sleeps_longer_and_longer_and_never_calls_the_vendors_own(make_rig, vendor: Vendor) -> None:
    runtime = SleepCounter()
    rig = make_rig(vendor, runtime=runtime)
    with rig.machine.hold_copies():
        _, done = rig.copy(step_rows(1))
        with pytest.raises(DeviceWaitTimeoutError, match=r"stream 'copy' is not complete within timeout_s=0\.02"):
            done.synchronize(SHORT_S)
    slept_s = runtime.slept_s[:-1]  # the last is what was left of the time
    assert slept_s[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert slept_s == sorted(slept_s)
    assert max(slept_s) == LONGEST_PAUSE_S
    assert sum(runtime.slept_s) == pytest.approx(SHORT_S)
    rig.machine.wait_until(done.query)
    assert rig.machine.calls == {}


def test_a_wait_of_no_time_asks_once_and_a_complete_event_needs_none(rig: FakeRig) -> None:
    with rig.machine.hold_copies():
        _, done = rig.copy(step_rows(1))
        with pytest.raises(DeviceWaitTimeoutError, match=r"timeout_s=0\.0"):
            done.synchronize(0.0)
    done.synchronize(WAIT_S)
    done.synchronize(0.0)


def test_a_step_makes_no_call_that_blocks_or_asks_the_driver(rig: FakeRig) -> None:
    ring = rig.backend.snapshot_ring(2, 4096, torch.device("cpu"))
    events = []
    for step in range(8):
        carver = ring.slot(step % 2)
        clone = rig.backend.snapshot(step_rows(step), carver)
        events.append(rig.backend.current_stream().record())
        rig.page.restart()
        _, done = rig.copy(clone)
        rig.stream.wait(events[-1])
        done.query()
        done.synchronize(WAIT_S)
    assert rig.machine.calls == {}
    assert rig.machine.copies_done == 8


def test_a_copy_comes_behind_what_the_producer_had_queued(rig: FakeRig) -> None:
    rig.producer()
    static, ring = torch.zeros(5, 8), rig.backend.snapshot_ring(1, 4096, torch.device("cpu"))
    gate = rig.stall_current_stream()
    static.copy_(step_rows(3), non_blocking=True)
    clone = rig.backend.snapshot(static, ring.slot(0))
    destination, done = rig.copy(clone)
    static.copy_(step_rows(9), non_blocking=True)  # the next replay
    time.sleep(SHORT_S)
    assert not done.query()
    gate.set()
    done.synchronize(WAIT_S)
    assert torch.equal(destination, step_rows(3))


def test_the_producers_stream_goes_on_being_the_threads_after_a_copy(rig: FakeRig) -> None:
    rig.producer()
    before = rig.backend.current_stream()
    _, done = rig.copy(step_rows(1))
    assert rig.backend.current_stream() is before
    done.synchronize(WAIT_S)


def test_a_refused_copy_leaves_the_thread_on_the_producers_stream(rig: FakeRig, monkeypatch) -> None:
    rig.producer()
    before = rig.backend.current_stream()
    destination, rows = rig.destination(step_rows(1)), step_rows(1)

    def refuse(*args, **kwargs):
        raise RuntimeError("the driver said no")

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "copy_", refuse)
        with pytest.raises(DeviceCopyError, match=r"160 bytes .* stream 'copy' .*not be queued.*driver said no"):
            rig.backend.copy_to_host(destination, rows, rig.stream)
    assert rig.backend.current_stream() is before


def test_a_stream_waits_for_another(rig: FakeRig) -> None:
    other = rig.backend.new_stream("other")
    rows = step_rows(2)
    with rig.machine.hold_copies():
        _, first = rig.copy(step_rows(1))
        other.wait(first)
        later = other.record()
        destination = rig.destination(rows)
        second = rig.backend.copy_to_host(destination, rows, other)
        time.sleep(SHORT_S)
        assert not later.query()
    second.synchronize(WAIT_S)
    assert first.query()
    assert torch.equal(destination, rows)


def test_an_event_of_another_backend_is_refused_not_ignored(make_rig) -> None:
    cuda, npu = make_rig(Vendor.CUDA), make_rig(Vendor.NPU)
    with pytest.raises(TypeError, match="stream 'copy' cannot wait for a AcceleratorEvent of another backend"):
        cuda.stream.wait(npu.stream.record())
    with pytest.raises(TypeError, match="of another backend"):
        npu.stream.wait(cuda.stream.record())


def test_failed_work_is_an_error_of_every_event_behind_it_for_ever(rig: FakeRig) -> None:
    rig.machine.fail_next_copy(RuntimeError("ECC error"))
    _, done = rig.copy(step_rows(1))
    for _ in range(2):
        with pytest.raises(DeviceCopyError, match=r"stream 'copy' failed: RuntimeError: ECC error"):
            done.synchronize(WAIT_S)
        with pytest.raises(DeviceCopyError, match="ECC error"):
            done.query()


@pytest.mark.parametrize("vendor", [Vendor.CUDA])
def test_a_lost_device_refuses_by_name_whatever_is_queued(make_rig, vendor: Vendor) -> None:
    rig = make_rig(vendor)
    rig.machine.fail_next_copy(RuntimeError("illegal address"))
    _, done = rig.copy(step_rows(1))
    with pytest.raises(DeviceCopyError):
        done.synchronize(WAIT_S)
    with pytest.raises(DeviceCopyError, match=r"no event could be recorded on stream 'copy'.*illegal address"):
        rig.stream.record()
    with pytest.raises(DeviceCopyError, match="illegal address"):
        rig.copy(step_rows(2))


def test_known_streams_are_not_made_again(rig: FakeRig) -> None:
    assert rig.backend.current_stream() is rig.backend.current_stream()
    default = rig.backend.current_stream()
    rig.producer()
    assert rig.backend.current_stream() is rig.backend.current_stream()
    assert rig.backend.current_stream() is not default
