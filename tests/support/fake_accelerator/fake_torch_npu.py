# SPDX-License-Identifier: Apache-2.0
"""`torch_npu.npu` without CANN: its names and signatures (torch_npu 2.14), and what they are known to do (A1).

`NpuModule` binds `Stream` and `Event` to a machine. Signatures are those of the real wheel, which a test compares.
"""

from contextlib import contextmanager
from types import SimpleNamespace

import torch

ACL_SUCCESS = 0
ACL_ERROR_RT_MEMORY_ALLOCATION = 207001
ACL_ERROR_INVALID_PARAM = 100000
PRIVATEUSE1 = 20
"""`int(c10::DeviceType::PrivateUse1)`."""


class Stream:
    """`torch_npu.npu.Stream` (`npu/streams.py`)."""

    machine = None

    def __new__(cls, device=None, priority=0, **kwargs):
        stream = super().__new__(cls)
        index = cls.machine.use_device() if device is None else torch.device("cpu", device).index
        stream.device_index = kwargs.get("device_index", index)
        stream.device_type = kwargs.get("device_type", PRIVATEUSE1)
        stream.stream_id = kwargs.get("stream_id")
        if stream.stream_id is None:
            stream.stream_id = cls.machine.next_stream_id(stream.device_index)
        return stream

    @property
    def queue(self):
        """The hardware's; not in torch_npu."""
        return self.machine.queue(self.device_index, self.stream_id)

    @property
    def npu_stream(self):
        """The raw handle; draining first (A1: `MakeSureQueueEmpty`)."""
        self.machine.calls["Stream.npu_stream"] += 1
        self.machine.drain_tasks()
        return 0x1000 + self.stream_id

    @property
    def priority(self):
        raise RuntimeError("NPU does not support the priority of a stream (A1)")

    def wait_event(self, event):
        event.wait(self)

    def wait_stream(self, stream):
        self.wait_event(stream.record_event())

    def record_event(self, event=None):
        event = type(self).event_class() if event is None else event
        event.record(self)
        return event

    def query(self):
        """NOT without blocking: drains the host task queue first (A1)."""
        self.machine.calls["Stream.query"] += 1
        self.machine.drain_tasks()
        return self.queue.idle

    def synchronize(self):
        self.machine.calls["Stream.synchronize"] += 1
        self.machine.drain(self.queue)

    def __eq__(self, other):
        return isinstance(other, Stream) and self.stream_id == other.stream_id

    def __hash__(self):
        return hash((self.npu_stream, self.device_index))  # drains, as the real one does


class Event:
    """`torch_npu.npu.Event` (`npu/streams.py`, `csrc/npu/Event.cpp`): `blocking` is parsed and ignored (A1)."""

    machine = None

    def __new__(cls, enable_timing=False, blocking=False, interprocess=False):
        event = super().__new__(cls)
        event._mark = None  # made lazily, at the first record
        return event

    def record(self, stream=None):
        """Only puts the record into the host task queue. `stream` is cast without a check of its type (A1)."""
        self.machine.use_device()
        if stream is None:
            raise AssertionError("not simulated: record() without a stream")
        if not isinstance(stream, Stream):
            self.machine.faults.append(f"Event.record() cast a {type(stream).__name__} to a stream")
            return
        self._mark = self.machine.mark(stream.queue)

    def wait(self, stream=None):
        """A no-op if never recorded (A1), or if the families differ (A4.1)."""
        self.machine.use_device()
        if not isinstance(stream, Stream):
            self.machine.faults.append(f"Event.wait() cast a {type(stream).__name__} to a stream")
        elif self._mark is not None:
            self.machine.wait_for_mark(stream.queue, self._mark)

    def query(self):
        """True if never recorded; False as long as the record waits in the host task queue (A1). Holds the GIL."""
        self.machine.use_device()
        if self._mark is None:
            return True
        if self._mark.done and self._mark.failure is not None:
            raise self._mark.failure
        return self._mark.done

    def synchronize(self):
        """Returns at once if never recorded; else spins without sleep until the task queue has launched it (A1)."""
        self.machine.use_device()
        self.machine.calls["Event.synchronize"] += 1
        if self._mark is not None:
            self.machine.drain_tasks()
            self.machine.wait_until(self.query)

    def elapsed_time(self, end_event):
        """Drains all queues and synchronises both events (A1)."""
        self.machine.calls["Event.elapsed_time"] += 1
        self.synchronize()
        end_event.synchronize()
        return 0.0

    def recorded_time(self):
        self.machine.calls["Event.recorded_time"] += 1
        return 0

    def ipc_handle(self):
        raise RuntimeError("not simulated")


class Npurt:
    """`torch_npu._C._npurt` (`csrc/npu/npurt.cpp`): returns ACL statuses as integers."""

    def __init__(self, machine):
        self._machine = machine

    def npuHostRegister(self, ptr, size, flags):  # noqa: N802
        if ptr % 4096 or size % 4096:
            return ACL_ERROR_INVALID_PARAM
        return ACL_SUCCESS if self._machine.register(ptr, size) else ACL_ERROR_RT_MEMORY_ALLOCATION

    def npuHostUnregister(self, ptr):  # noqa: N802
        return ACL_SUCCESS if self._machine.unregister(ptr) else ACL_ERROR_INVALID_PARAM


class OlderNpuModule:
    """`torch_npu.npu` before 2.14: without `npurt` (A1)."""

    def __init__(self, machine):
        self.machine = machine
        self.Event = type("Event", (Event,), {"machine": machine, "__module__": "torch_npu.npu.streams"})
        self.Stream = type(
            "Stream", (Stream,), {"machine": machine, "event_class": self.Event, "__module__": "torch_npu.npu.streams"}
        )
        self.utils = SimpleNamespace(get_cann_version=self._get_cann_version)

    def is_available(self):
        return True

    def device_count(self):
        return self.machine.num_devices

    def set_device(self, device):
        self.machine.set_device(device)

    def current_device(self):
        return self.machine.use_device()

    def current_stream(self, device=None):
        device = self.machine.use_device() if device is None else device
        stream_id = self.machine.current_stream_id(device)
        return self.Stream(stream_id=stream_id, device_index=device, device_type=PRIVATEUSE1)

    def set_stream(self, stream):
        if stream is not None:
            self.machine.set_current_stream_id(stream.device_index, stream.stream_id)

    @contextmanager
    def stream(self, stream):
        before = self.current_stream(stream.device_index)
        self.set_stream(stream)
        try:
            yield
        finally:
            self.set_stream(before)

    def get_device_name(self, device_name=None):
        return "Ascend910B4"

    def mem_get_info(self, device=None):
        return 48 << 30, 64 << 30

    def _get_cann_version(self, module="CANN"):
        return {"CANN": "9.1.0", "DRIVER": "25.5.0"}[module]


class NpuModule(OlderNpuModule):
    """`torch_npu.npu` of 2.14."""

    def __init__(self, machine):
        super().__init__(machine)
        self._npurt = Npurt(machine)

    def npurt(self):
        return self._npurt
