# SPDX-License-Identifier: Apache-2.0
"""The hardware and driver under a fake device module: streams, copies, devices of threads, mishaps."""

import threading
import time
import weakref
from collections import Counter, deque
from contextlib import contextmanager
from functools import partial

import torch

from fake_accelerator.hardware_queue import HardwareQueue, HostTaskQueue, Mark
from fake_accelerator.pinned_ranges import PinnedRanges

PATIENCE_S = 20.0
"""How long the fake waits for what must come before it says that the test is stuck."""
POISON = 0x55
"""What a copy writes whose source is gone."""


class FakeMachine(PinnedRanges):
    """Devices with streams.

    Args:
        host_task_queue: work is only put into a queue of the host, and launched by another thread (A1, NPU).
        default_device: the device of a thread that was given none; `None`: it has none, and every call fails (A1).
        num_devices: how many.

    Copies on a default stream that has nothing to do are done at once; a model's stream that does not, see
    `make_producer`.
    """

    def __init__(self, *, host_task_queue, default_device, num_devices=2):
        super().__init__()
        self.num_devices = num_devices
        self.changed = threading.Condition(threading.RLock())
        self.calls = Counter()
        """Calls that block, ask the driver or drain the task queue, by name. A step may make none."""
        self.faults = []
        """What the driver, or the hardware, would have turned into wrong bytes or a crash."""
        self.contexts = set()
        """Devices that some thread used."""
        self.queues = {}
        self.streams_made = 0
        self.copies_done = 0
        self.lost = None
        """Once set, the device is lost: every call raises it (CUDA's sticky errors)."""
        self.sticky = False
        self._copies_in_flight = []
        self._default_device = default_device
        self._thread = threading.local()
        self._pools = Counter()
        self._holds = 0
        self._failures = deque()
        self._producers = set()
        self._tasks = HostTaskQueue(self.changed) if host_task_queue else None

    # -- threads and devices

    @property
    def device(self):
        """The calling thread's, or `None`."""
        return getattr(self._thread, "device", self._default_device)

    def set_device(self, device):
        if not 0 <= device < self.num_devices:
            raise RuntimeError(f"invalid device ordinal {device}")
        self._raise_if_lost()
        self._thread.device = device
        self.contexts.add(device)

    def use_device(self):
        """What every call of the runtime begins with."""
        self._raise_if_lost()
        if self.device is None:
            raise RuntimeError("context is empty, error code is 107002")
        self.contexts.add(self.device)
        return self.device

    def _raise_if_lost(self):
        if self.lost is not None:
            raise self.lost

    # -- streams

    def queue(self, device, stream_id):
        with self.changed:
            return self.queues.setdefault((device, stream_id), HardwareQueue(self, device, stream_id))

    def next_stream_id(self, device, streams_per_pool=32):
        """From a pool, round robin: the 33rd stream is the first again (A1; c10/cuda has the same)."""
        with self.changed:
            stream_id = 1 + self._pools[device] % streams_per_pool
            self._pools[device] += 1
            self.streams_made += 1
        return stream_id

    def current_stream_id(self, device):
        return getattr(self._thread, "streams", {}).get(device, 0)

    def set_current_stream_id(self, device, stream_id):
        self.use_device()
        if not hasattr(self._thread, "streams"):
            self._thread.streams = {}
        self._thread.streams[device] = stream_id

    def make_producer(self, device, stream_id):
        """Copies on this stream stay on the device: a model's stream."""
        self._producers.add((device, stream_id))

    # -- work

    def submit(self, queue, item):
        """Queue work; with a host task queue it is not even launched when this returns."""
        self._raise_if_lost()
        with self.changed:
            if self._tasks is None:
                queue.launch(item)
            else:
                self._tasks.put(queue, item)

    def mark(self, queue):
        mark = Mark()

        def reach(reached_by):
            with self.changed:
                mark.failure = reached_by.failure
                mark.done = True
                self.changed.notify_all()

        self.submit(queue, reach)
        return mark

    def wait_for_mark(self, queue, mark):
        def wait(_):
            with self.changed:
                self.changed.wait_for(lambda: mark.done)

        self.submit(queue, wait)

    def drain_tasks(self):
        """Block until the host task queue is empty (A1: MakeSureQueueEmpty)."""
        self._wait(lambda: self._tasks is None or self._tasks.idle, "the host task queue is held")

    def drain(self, queue):
        """Block until everything queued on a stream is done."""
        self.drain_tasks()
        self._wait(lambda: queue.idle, f"stream {queue.stream_id} is held")

    def _wait(self, condition, stuck):
        with self.changed:
            if not self.changed.wait_for(condition, PATIENCE_S):
                raise AssertionError(f"a call blocked for ever: {stuck}")

    # -- copies

    def copy(self, destination, source, *, non_blocking, original):
        """What `destination.copy_(source)` does on the calling thread."""
        device = self.device
        stream_id = 0 if device is None else self.current_stream_id(device)
        if device is None:
            return original(destination, source)
        self.use_device()
        queue = self.queue(device, stream_id)
        if stream_id == 0 and self._is_idle(queue):
            return original(destination, source)
        on_device = stream_id == 0 or (device, stream_id) in self._producers
        if not on_device and not self._is_asynchronous(destination, source):
            self.calls["copy to pageable memory"] += 1
            non_blocking = False
        elif not on_device and self.ranges_under(destination) > 1:
            # sgl-project/sglang#36798
            raise RuntimeError("invalid argument: the copy runs from one registered range into another")
        self.submit(queue, self._copy_item(destination, source, original, on_device=on_device))
        if not non_blocking:
            self.drain(queue)
        return destination

    def _is_idle(self, queue):
        with self.changed:
            return queue.idle and (self._tasks is None or self._tasks.idle)

    def _is_asynchronous(self, destination, source):
        """A1, "non_blocking D2H": anything else goes through pageable memory, or waits for the stream."""
        fits = destination.is_contiguous() and destination.dtype == source.dtype
        return fits and self.is_pinned(destination)

    def _copy_item(self, destination, source, original, *, on_device):
        # Hardware holds no references: what is freed while a copy is queued is gone. Memory that is freed on the stream
        # it is used on is safe: the allocator hands it on behind that use.
        to, of = (weakref.ref(used) if not on_device else partial(_same, used) for used in (destination, source))
        span = (destination.data_ptr(), destination.data_ptr() + destination.numel() * destination.element_size())
        flight = (span, on_device)
        with self.changed:
            self._copies_in_flight.append(flight)

        def run(queue):
            if not on_device:
                with self.changed:
                    self.changed.wait_for(lambda: not self._holds)
                    failure = self._failures.popleft() if self._failures else None
                    if failure is not None:
                        # The copy stays in flight: nobody knows whether the transfer has really stopped.
                        queue.failure = failure
                        self.lost = failure if self.sticky else None
                        self.changed.notify_all()
                        return
            kept_to, kept_of = to(), of()
            if kept_to is None:
                self.faults.append("the destination of a queued copy was freed")
            elif kept_of is None:
                self.faults.append("the source of a queued copy was freed")
                with torch.inference_mode():
                    kept_to.view(torch.uint8).fill_(POISON)
            else:
                with torch.inference_mode():
                    original(kept_to, kept_of)
            with self.changed:
                self._copies_in_flight.remove(flight)
                self.copies_done += not on_device
                self.changed.notify_all()

        return run

    @contextmanager
    def hold_copies(self):
        """No queued copy to the host runs inside."""
        with self.changed:
            self._holds += 1
        try:
            yield
        finally:
            with self.changed:
                self._holds -= 1
                self.changed.notify_all()

    def hold_tasks(self):
        """The host task queue launches nothing inside."""
        return self._tasks.hold()

    def fail_next_copy(self, failure):
        """The next copy to the host fails."""
        with self.changed:
            self._failures.append(failure)

    # -- page-locked memory

    def register(self, address, nbytes):
        self.use_device()
        return super().register(address, nbytes)

    def unregister(self, address):
        self.use_device()
        nbytes = self.pinned.get(address, 0)
        with self.changed:
            if any(address < stop and start < address + nbytes for (start, stop), _ in self._copies_in_flight):
                self.faults.append("memory was unlocked under a queued or failed copy")
        return super().unregister(address)

    # -- the last error, and the end

    def remember_error(self, error):
        """The thread's next kernel launch reports it (vllm-project/vllm#50070)."""
        self._thread.last_error = error

    def report_last_error(self):
        """A kernel is launched."""
        error = getattr(self._thread, "last_error", None)
        self._thread.last_error = None
        if error is not None:
            raise error

    def shut_down(self):
        """What the vendor's own exit handler does; Ascend's is known to abort (faults.md, row 105)."""
        if self.pinned or self._copies_in_flight:
            raise SystemError("the driver was shut down under page-locked memory or running copies")

    def wait_until(self, condition):
        """Give workers time; `AssertionError` if `condition()` does not come true."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > deadline_s:
                raise AssertionError("did not come true")
            time.sleep(0.001)


def _same(tensor):
    return tensor
