# SPDX-License-Identifier: Apache-2.0
"""`torch.cuda` without CUDA: its names and signatures (torch 2.13), and what they are known to do (A2).

The names that other packages replace stand here as such packages leave them (A4.2): stand-ins that do nothing.
"""

from enum import IntEnum
from types import SimpleNamespace

CUDA = 1
"""`int(c10::DeviceType::CUDA)`."""


class Stream:
    """`torch.cuda.streams.Stream`."""

    machine = None

    def __new__(cls, device=None, priority=0, **kwargs):
        stream = super().__new__(cls)
        stream.device_index = kwargs.get("device_index", cls.machine.use_device() if device is None else device)
        stream.device_type = kwargs.get("device_type", CUDA)
        stream.stream_id = kwargs.get("stream_id")
        if stream.stream_id is None:
            stream.stream_id = cls.machine.next_stream_id(stream.device_index)
        return stream

    @property
    def queue(self):
        """The hardware's; not in torch."""
        return self.machine.queue(self.device_index, self.stream_id)

    def wait_event(self, event):
        event.wait(self)

    def wait_stream(self, stream):
        self.wait_event(stream.record_event())

    def record_event(self, event=None):
        event = type(self).event_class() if event is None else event
        event.record(self)
        return event

    def query(self):
        self.machine.calls["Stream.query"] += 1
        return self.queue.idle

    def synchronize(self):
        self.machine.calls["Stream.synchronize"] += 1
        self.machine.drain(self.queue)


class Event:
    """`torch.cuda.streams.Event`. Errors of earlier work come back from any call (CUDA's sticky errors)."""

    machine = None

    def __new__(cls, enable_timing=False, blocking=False, interprocess=False, external=False):
        event = super().__new__(cls)
        event._mark = None
        return event

    def record(self, stream=None):
        self.machine.use_device()
        self._mark = self.machine.mark(stream.queue)

    def wait(self, stream=None):
        self.machine.use_device()
        if self._mark is not None:
            self.machine.wait_for_mark(stream.queue, self._mark)

    def query(self):
        self.machine.use_device()
        if self._mark is None:
            return True
        if self._mark.done and self._mark.failure is not None:
            raise self._mark.failure
        return self._mark.done

    def elapsed_time(self, end_event):
        """Raises if not complete (A1)."""
        self.machine.calls["Event.elapsed_time"] += 1
        if not (self.query() and end_event.query()):
            raise RuntimeError("CUDA error: device not ready")
        return 0.0

    def synchronize(self):
        """Without a limit."""
        self.machine.calls["Event.synchronize"] += 1
        self.machine.wait_until(self.query)

    def ipc_handle(self):
        raise RuntimeError("not simulated")


class EventStandIn:
    """What vLLM's CPU worker leaves as `torch.cuda.Event` (`v1/worker/cpu/shm.py`): no `query`."""

    def __init__(self, *args, **kwargs):
        self.record = self.wait = self.synchronize = nothing


class StreamStandIn:
    """What it leaves as `torch.cuda.Stream`, and as the answer of `current_stream` and `stream`."""

    stream_id = 0

    def __init__(self, *args, **kwargs):
        self.wait_stream = self.wait_event = self.record_event = self.synchronize = nothing

    def query(self):
        return True

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        return None


def nothing(*args, **kwargs):
    """A stand-in."""


class CudaError(IntEnum):
    """`torch._C._cudart.cudaError`."""

    success = 0
    outOfMemory = 2  # noqa: N815
    hostMemoryNotRegistered = 713  # noqa: N815


class Cudart:
    """`torch._C._cudart`: returns statuses and raises nothing; the runtime remembers a failure as the last error."""

    cudaError = CudaError  # noqa: N815

    def __init__(self, machine):
        self._machine = machine

    def cudaHostRegister(self, ptr, size, flags):  # noqa: N802
        if self._machine.register(ptr, size):
            return CudaError.success
        self._machine.remember_error(RuntimeError("CUDA error: out of memory"))
        return CudaError.outOfMemory

    def cudaHostUnregister(self, ptr):  # noqa: N802
        if self._machine.unregister(ptr):
            return CudaError.success
        self._machine.remember_error(RuntimeError("CUDA error: memory was not registered"))
        return CudaError.hostMemoryNotRegistered

    def cudaMemGetInfo(self, device):  # noqa: N802
        return 60 << 30, 80 << 30

    def cudaGetErrorString(self, error):  # noqa: N802
        return {CudaError.outOfMemory: "out of memory"}.get(error, f"error {int(error)}")


class CudaModule:
    """`torch.cuda` after vLLM's CPU worker was imported."""

    def __init__(self, machine):
        self.machine = machine
        event_class = type("Event", (Event,), {"machine": machine, "__module__": "torch.cuda.streams"})
        stream_class = type(
            "Stream", (Stream,), {"machine": machine, "event_class": event_class, "__module__": "torch.cuda.streams"}
        )
        self.streams = SimpleNamespace(Stream=stream_class, Event=event_class)
        self.Event = EventStandIn
        self.Stream = StreamStandIn
        self.set_stream = nothing
        self._cudart = Cudart(machine)

    def init(self):
        return None

    def cudart(self):
        return self._cudart

    def current_stream(self, device=None):
        return StreamStandIn()

    def stream(self, stream):
        return StreamStandIn()

    def get_device_name(self, device=None):
        return "NVIDIA H100 80GB HBM3"

    def mem_get_info(self, device=None):
        raise AssertionError("replaced by vllm-ascend (A4.2)")


class Binding:
    """The part of `torch._C` that `torch.cuda` calls."""

    def __init__(self, machine):
        self._machine = machine

    def _cuda_setDevice(self, device):  # noqa: N802
        self._machine.set_device(device)

    def _cuda_getDevice(self):  # noqa: N802
        return self._machine.use_device()

    def _cuda_getCurrentStream(self, device):  # noqa: N802
        return self._machine.current_stream_id(device), device, CUDA

    def _cuda_setStream(self, stream_id, device_index, device_type):  # noqa: N802
        self._machine.set_current_stream_id(device_index, stream_id)
