# SPDX-License-Identifier: Apache-2.0
"""Threads, devices and streams of `cuda` and `npu`: bound to the right device, on classes nobody has replaced."""

from __future__ import annotations

import pytest
import torch
from fake_accelerator.backends import VENDORS, Vendor
from fake_accelerator.fake_torch_cuda import EventStandIn, StreamStandIn
from fake_accelerator.rig import WAIT_S, FakeRig, on_a_thread, step_rows

from omni_core.backend import BackendError, BackendOptionError
from omni_core.backend.accelerator import STREAMS_PER_POOL
from omni_core.runtime import ThreadingRuntime


@pytest.mark.parametrize("vendor", VENDORS)
def test_every_thread_gets_the_device_of_the_thread_that_made_the_backend(make_rig, vendor: Vendor) -> None:
    rig = make_rig(vendor)
    rig.machine.set_device(1)
    backend = vendor.backend(rig.machine)

    def bound() -> int:
        backend.bind_thread()
        return rig.machine.device

    assert on_a_thread(bound) == 1
    assert backend.device_info().device.endswith(":1")
    backend.close()


def test_rank_1_leaves_no_context_on_device_0(make_rig) -> None:
    rig = make_rig(Vendor.CUDA)
    rig.backend.close()
    rig.machine.set_device(1)
    rig.machine.contexts.clear()
    backend = rig.vendor.backend(rig.machine)
    arena = backend.pinned_arena(1 << 16)
    stream = backend.new_stream("copy")
    rows = step_rows(1)
    destination = arena.buffer[: rows.nbytes].view(rows.dtype).view(rows.shape)
    done = backend.copy_to_host(destination, rows, stream)

    def commit() -> None:
        backend.bind_thread()
        done.synchronize(WAIT_S)

    on_a_thread(commit)
    on_a_thread(backend.close)  # not bound: whoever closes need not know
    assert torch.equal(destination, rows)
    assert rig.machine.contexts == {1}


def test_a_thread_of_ascend_that_was_not_bound_is_told_so_by_the_vendor(make_rig) -> None:
    rig = make_rig(Vendor.NPU)
    with pytest.raises(RuntimeError, match="context is empty"):
        on_a_thread(rig.backend.current_stream)

    def bound() -> str:
        rig.backend.bind_thread()
        return rig.backend.current_stream().name

    assert on_a_thread(bound) == "current-0"


@pytest.mark.parametrize("option", [{"device_index": -1}, {"close_timeout_s": -0.5}, {"close_timeout_s": float("nan")}])
def test_options_out_of_range_are_refused_by_name(rig: FakeRig, option: dict[str, float]) -> None:
    (name, value) = next(iter(option.items()))
    with pytest.raises(BackendOptionError, match=f"{name}={value} must be at least 0"):
        rig.vendor.backend(rig.machine, **option)


def test_a_tensor_of_another_device_is_not_owned(rig: FakeRig) -> None:
    assert rig.backend.owns(step_rows(1))
    assert not rig.backend.owns(step_rows(1).to("meta"))


# --- replaced names


class Replaced:
    """A device module after vLLM's CPU worker, or vllm-ascend, has been at it."""

    Stream = StreamStandIn
    Event = EventStandIn
    set_device = current_device = set_stream = get_device_name = mem_get_info = EventStandIn

    @staticmethod
    def current_stream(device=None):
        return StreamStandIn()


def test_names_replaced_after_the_backend_was_made_are_not_looked_at(make_rig) -> None:
    rig = make_rig(Vendor.NPU)
    for name in ("Event", "set_device", "current_stream", "set_stream", "mem_get_info"):
        setattr(rig.module, name, getattr(Replaced, name))
    rows = step_rows(4)
    with rig.machine.hold_copies():
        destination, done = rig.copy(rows)
        assert not done.query()
    done.synchronize(WAIT_S)
    assert torch.equal(destination, rows)
    rig.backend.new_stream("another").record().synchronize(WAIT_S)
    on_a_thread(rig.backend.bind_thread)
    assert rig.backend.device_info().total_memory_bytes > 0


@pytest.mark.parametrize("name", ["Event", "Stream"])
def test_generic_names_of_torch_are_not_looked_at(rig: FakeRig, monkeypatch, name: str) -> None:
    monkeypatch.setattr(torch, name, {"Event": EventStandIn, "Stream": StreamStandIn}[name])
    monkeypatch.setattr(torch.cuda, name, {"Event": EventStandIn, "Stream": StreamStandIn}[name])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: StreamStandIn())
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    rows = step_rows(4)
    with rig.machine.hold_copies():
        destination, done = rig.copy(rows)
        assert not done.query()
    done.synchronize(WAIT_S)
    assert torch.equal(destination, rows)


def test_a_current_stream_that_was_replaced_before_is_an_error_that_says_so(make_rig) -> None:
    rig = make_rig(Vendor.NPU)
    module = rig.vendor.device_module(rig.machine)
    module.current_stream = Replaced.current_stream
    backend = rig.vendor.backend(rig.machine, device_module=module)
    with pytest.raises(BackendError, match=r"StreamStandIn, not a torch_npu\.npu\.streams\.Stream: another package"):
        backend.current_stream()
    backend.close()


# --- the pool of streams


def test_streams_made_one_after_another_are_one_native_stream(rig: FakeRig) -> None:
    made = rig.machine.streams_made
    for number in range(2 * STREAMS_PER_POOL):
        stream = rig.backend.new_stream(f"step-{number}")
        destination = rig.destination(step_rows(number % 7))
        rig.backend.copy_to_host(destination, step_rows(number % 7), stream)
        stream.close()
        rig.page.restart()
    assert rig.machine.streams_made == made + 1


def test_a_stream_that_would_be_another_one_is_refused(rig: FakeRig) -> None:
    streams = [rig.backend.new_stream(f"copy-{number}") for number in range(STREAMS_PER_POOL - 1)]
    with pytest.raises(BackendError, match=r"new_stream\('one-more'\): 32 streams are open"):
        rig.backend.new_stream("one-more")
    streams[0].close()
    streams[0].close()
    assert rig.backend.new_stream("one-more").name == "one-more"


def test_a_closed_stream_refuses_by_name(rig: FakeRig) -> None:
    rig.stream.close()
    rows = step_rows(1)
    for call in (
        rig.stream.record,
        lambda: rig.stream.wait(rig.backend.current_stream().record()),
        lambda: rig.backend.copy_to_host(rig.destination(rows), rows, rig.stream),
    ):
        with pytest.raises(BackendError, match=r"stream 'copy' is closed; make a new one with new_stream"):
            call()


def test_closing_the_producers_stream_leaves_it_alone(rig: FakeRig) -> None:
    rig.backend.current_stream().close()
    rig.backend.current_stream().record().synchronize(WAIT_S)


def test_a_backend_without_its_hardware_and_without_a_module_is_not_made(rig: FakeRig) -> None:
    real = rig.vendor.backend_class.__mro__[2]
    reason = real.unavailable_reason()
    if reason is not None:
        with pytest.raises(Exception, match="cannot run on this machine"):
            real(ThreadingRuntime())
