# SPDX-License-Identifier: Apache-2.0
"""Load beside the steps that moves producer, copies and readers against each other, differently with each seed."""

from __future__ import annotations

import random
from types import ModuleType
from typing import Any

import torch

from omni_core.runtime import Runtime

_MIB = 1 << 20
_BUSY_SIZE = 2048
_TRAFFIC_NBYTES = 8 * _MIB


class HostLoad:
    """Where the device is the host: threads are held up at random."""

    def __init__(self, seed: int, runtime: Runtime) -> None:
        self._engine_rng = random.Random(f"engine {seed}")
        self._builder_rng = random.Random(f"builder {seed}")
        self._runtime = runtime

    def before_forward(self, number: int) -> None:
        """See `Disturbance`."""

    def after_save(self, number: int) -> None:
        """Let the engine be late now and then."""
        if self._engine_rng.random() < 0.1:
            self._runtime.sleep(self._engine_rng.random() * 0.002)

    def before_materialize(self, number: int) -> None:
        """Let the reader be late: steps pile up, pages are read long after they were written."""
        if self._builder_rng.random() < 0.2:
            self._runtime.sleep(self._builder_rng.random() * 0.004)


class DeviceLoad(HostLoad):
    """On a device: a late producer, a busy second stream, copies of others, and memory that changes hands."""

    def __init__(
        self, seed: int, runtime: Runtime, module: ModuleType, device: torch.device, *, busy_size: int = _BUSY_SIZE
    ) -> None:
        super().__init__(seed, runtime)
        self._rng = random.Random(f"device {seed}")
        self._module = module
        self._device = device
        self._compute: Any = self._module.Stream()
        self._copies: Any = self._module.Stream()
        self._left = torch.full((busy_size, busy_size), 1e-3, dtype=torch.bfloat16, device=device)
        self._on_current, self._beside = torch.empty_like(self._left), torch.empty_like(self._left)
        self._source = torch.zeros(_TRAFFIC_NBYTES, dtype=torch.uint8, device=device)
        self._pinned = torch.empty(_TRAFFIC_NBYTES, dtype=torch.uint8).pin_memory()
        self._module.synchronize()

    def before_forward(self, number: int) -> None:
        """Make the producer late, and the device busy beside it."""
        for _ in range(self._rng.choice((0, 0, 1, 4, 20))):
            torch.mm(self._left, self._left, out=self._on_current)
        with self._module.stream(self._compute):
            for _ in range(self._rng.choice((0, 2, 10))):
                torch.mm(self._left, self._left, out=self._beside)
        with self._module.stream(self._copies):
            for _ in range(self._rng.choice((0, 0, 1, 3))):
                self._pinned.copy_(self._source, non_blocking=True)

    def after_save(self, number: int) -> None:
        """Write garbage into fresh memory, which may be what the step's tensors or clones lay in."""
        for _ in range(self._rng.choice((0, 1, 4))):
            nbytes = self._rng.choice((1 << 10, 1 << 14, 1 << 17, 1 << 19))
            torch.full((nbytes,), 0x33, dtype=torch.uint8, device=self._device)
        super().after_save(number)
