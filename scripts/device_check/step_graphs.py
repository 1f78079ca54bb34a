# SPDX-License-Identifier: Apache-2.0
"""Computes a step's rows the way a served model does: captured graphs with static buffers, fresh tensors above them.

A graph first spoils its output buffers, then works for a while, then writes its rows: a snapshot that comes too early
or too late reads garbage. Rows go in scrambled and come out right, so they were computed on the device.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch

from device_check.backends import CheckedBackend
from device_check.traffic import Traffic, TrafficStep
from omni_core.testing.fake_model import FakeKey

_CARRIERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes of an element: the integers whose bits are scrambled."""
_BUSY_SIZE = 1024
_GARBAGE = 0x5A


class StepOutputs(NamedTuple):
    """What a forward leaves."""

    rows: Mapping[str, torch.Tensor]
    """`(num_tokens_padded, ...)` by key, real rows first; valid until the next step."""
    num_tokens_padded: int


class StepGraphs(Protocol):
    """A model's forward. Engine thread only."""

    def prepare(self, steps: tuple[TrafficStep, ...]) -> None:
        """Bring the inputs of all steps where a step can take them from without waiting."""

    def run(self, number: int) -> StepOutputs:
        """Queue step `number` on the current stream."""

    def wait(self) -> None:
        """Wait for everything queued on the current stream."""


class EmulatedGraphs:
    """On a CPU: the simulator's emulation of graphs."""

    def __init__(self, traffic: Traffic) -> None:
        from omni_core_cpu_sim import GraphEmulator  # the check runs on machines without it, too

        self._graphs = GraphEmulator(traffic.config.capture_sizes)
        self._steps: tuple[TrafficStep, ...] = ()

    def prepare(self, steps: tuple[TrafficStep, ...]) -> None:
        """See `StepGraphs`."""
        self._steps = steps

    def run(self, number: int) -> StepOutputs:
        """See `StepGraphs`."""
        step = self._steps[number]
        rows = {key: self._graphs.replay(key, values) for key, values in step.rows.items()}
        return StepOutputs(rows, self._graphs.padding.padded(step.num_tokens))

    def wait(self) -> None:
        """See `StepGraphs`."""


class DeviceGraphs:
    """On a device: one graph per capture size, all with the same static buffers.

    Args:
        checked: the backend's facts.
        module: torch's module of the device.
        device: where.
        traffic: its keys and capture sizes.
        busy_rounds: matrix products of each forward, before its rows are written.
    """

    def __init__(
        self, checked: CheckedBackend, module: ModuleType, device: torch.device, traffic: Traffic, busy_rounds: int
    ) -> None:
        self._module = module
        self._checked = checked
        self._device = device
        self._sizes = traffic.config.capture_sizes
        self._keys = {key.name: key for key in traffic.model.all_keys}
        self._busy_rounds = busy_rounds
        self._left = torch.full((_BUSY_SIZE, _BUSY_SIZE), 1e-3, device=device, dtype=torch.bfloat16)
        self._product = torch.empty_like(self._left)
        self._masks = {name: _mask(key).to(device) for name, key in self._keys.items()}
        self._inputs = {name: self._buffer(key) for name, key in self._keys.items()}
        self._outputs = {name: self._buffer(key) for name, key in self._keys.items()}
        self._host_inputs: list[dict[str, torch.Tensor]] = []
        self._num_tokens: list[int] = []
        self._graphs = self._capture_all()

    def prepare(self, steps: tuple[TrafficStep, ...]) -> None:
        """Scramble the rows into page-locked memory, each step its own: no step waits for another's input copy."""
        self._num_tokens = [step.num_tokens for step in steps]
        self._host_inputs = [
            {
                name: (_carried(rows, self._keys[name]) ^ _mask(self._keys[name])).pin_memory()
                for name, rows in step.rows.items()
            }
            for step in steps
        ]

    def run(self, number: int) -> StepOutputs:
        """See `StepGraphs`."""
        num_tokens, inputs = self._num_tokens[number], self._host_inputs[number]
        place = bisect_left(self._sizes, num_tokens)
        if place == len(self._sizes):
            return StepOutputs({name: self._eager(name, rows) for name, rows in inputs.items()}, num_tokens)
        padded = self._sizes[place]
        for name, rows in inputs.items():
            self._inputs[name][:num_tokens].copy_(rows, non_blocking=True)
        if self._checked.synchronizes_before_replay:
            self.wait()
        self._graphs[padded].replay()
        return StepOutputs({name: self._rows(name, self._outputs[name][:padded]) for name in inputs}, padded)

    def wait(self) -> None:
        """See `StepGraphs`."""
        self._module.current_stream().synchronize()

    def _eager(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        self._work()
        return self._rows(name, rows.to(self._device, non_blocking=True) ^ self._masks[name])

    def _work(self) -> None:
        for _ in range(self._busy_rounds):
            torch.mm(self._left, self._left, out=self._product)

    def _forward(self, size: int) -> None:
        for name in self._keys:
            self._outputs[name][:size].fill_(_GARBAGE)
        self._work()
        for name in self._keys:
            torch.bitwise_xor(self._inputs[name][:size], self._masks[name], out=self._outputs[name][:size])

    def _capture_all(self) -> dict[int, Any]:
        assert self._checked.graph_class is not None
        make_graph = getattr(self._module, self._checked.graph_class)
        self._forward(self._sizes[-1])  # what libraries allocate at their first use must not fall into a capture
        self._module.synchronize()
        graphs = {}
        for size in reversed(self._sizes):
            graph = make_graph()
            with self._module.graph(graph):
                self._forward(size)
            graphs[size] = graph
        self._module.synchronize()
        return graphs

    def _buffer(self, key: FakeKey) -> torch.Tensor:
        shape = (self._sizes[-1], key.width)
        return torch.zeros(shape, dtype=_CARRIERS[key.dtype.itemsize], device=self._device)

    def _rows(self, name: str, carried: torch.Tensor) -> torch.Tensor:
        key = self._keys[name]
        return carried.view(key.dtype).view(carried.shape[0], *key.trailing)


def producer_stream(device: torch.device) -> AbstractContextManager[object]:
    """A stream of its own for the engine thread: whoever copies after the default stream instead is too early."""
    if device.type == "cpu":
        return nullcontext()
    module = torch.get_device_module(device.type)
    entered: AbstractContextManager[object] = module.stream(module.Stream())
    return entered


def make_graphs(checked: CheckedBackend, device: torch.device, traffic: Traffic, busy_rounds: int) -> StepGraphs:
    """The forward for this backend; graphs are captured now."""
    if checked.graph_class is None:
        return EmulatedGraphs(traffic)
    return DeviceGraphs(checked, torch.get_device_module(device.type), device, traffic, busy_rounds)


def _mask(key: FakeKey) -> torch.Tensor:
    return (torch.arange(key.width, dtype=torch.int64) * 31 + 7).to(_CARRIERS[key.dtype.itemsize])


def _carried(rows: torch.Tensor, key: FakeKey) -> torch.Tensor:
    return rows.reshape(rows.shape[0], key.width).view(_CARRIERS[key.dtype.itemsize])
