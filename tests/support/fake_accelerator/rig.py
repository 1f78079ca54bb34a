# SPDX-License-Identifier: Apache-2.0
"""One backend on a fake machine, with an arena and a copy stream, for tests of what the machine sees."""

from collections.abc import Callable
from threading import Event, Thread

import torch

from fake_accelerator.backends import Vendor
from fake_accelerator.machine import FakeMachine
from omni_core.backend import ByteCarver
from omni_core.backend import Event as DeviceEvent
from omni_core.runtime import Runtime

WAIT_S = 20.0
SHORT_S = 0.02
WIDTH = 8
ARENA_BYTES = 1 << 16


def step_rows(request: int, num_tokens: int = 5) -> torch.Tensor:
    """Rows whose value encodes request, position and column."""
    positions = torch.arange(num_tokens).unsqueeze(1)
    return (request * 10_000 + positions * 100 + torch.arange(WIDTH)).to(torch.float32)


class FakeRig:
    """Made on the thread that the machine gave device 0, with torch on that machine."""

    def __init__(self, vendor: Vendor, machine: FakeMachine, *, runtime: Runtime | None = None, **options) -> None:
        self.vendor = vendor
        self.machine = machine
        self.module = vendor.device_module(self.machine)
        self.backend = vendor.backend(self.machine, runtime, device_module=self.module, **options)
        self.arena = self.backend.pinned_arena(ARENA_BYTES)
        self.page = ByteCarver(self.arena.buffer)
        self.stream = self.backend.new_stream("copy")

    def destination(self, rows: torch.Tensor) -> torch.Tensor:
        """Room in the arena, holding -1."""
        taken = self.page.take(rows.shape, rows.dtype)
        taken.fill_(-1)
        return taken

    def copy(self, rows: torch.Tensor) -> tuple[torch.Tensor, DeviceEvent]:
        """Queue a copy of `rows` into the arena."""
        destination = self.destination(rows)
        return destination, self.backend.copy_to_host(destination, rows, self.stream)

    def producer(self) -> None:
        """From now on the calling thread's device work goes to an asynchronous stream, as a model's does."""
        stream_id = self.machine.next_stream_id(0)
        self.machine.make_producer(0, stream_id)
        self.machine.set_current_stream_id(0, stream_id)

    def stall_current_stream(self) -> Event:
        """Nothing queued on the calling thread's stream from now on runs before the returned event is set."""
        gate = Event()
        queue = self.machine.queue(0, self.machine.current_stream_id(0))
        self.machine.submit(queue, lambda _: gate.wait(WAIT_S))
        return gate


def on_a_thread(work: Callable[[], object]) -> object:
    """What `work` returns, or raises, on a new thread."""
    outcome: list[object] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(work())
        except BaseException as error:
            failure.append(error)

    thread = Thread(target=run, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    assert not thread.is_alive(), "the thread is stuck"
    if failure:
        raise failure[0]
    return outcome[0]
