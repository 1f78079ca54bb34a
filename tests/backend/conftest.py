# SPDX-License-Identifier: Apache-2.0
"""Simulators that are closed when their test ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from omni_core_cpu_sim import CpuSimBackend

from omni_core.backend import DeviceWaitTimeoutError
from omni_core.runtime import Runtime, ThreadingRuntime

MakeSim = Callable[..., CpuSimBackend]


@pytest.fixture
def make_sim() -> Iterator[MakeSim]:
    made: list[CpuSimBackend] = []

    def make(runtime: Runtime | None = None, **options) -> CpuSimBackend:
        made.append(CpuSimBackend(runtime or ThreadingRuntime(), **options))
        return made[-1]

    yield make
    for backend in made:
        close_at_last(backend)


def close_at_last(backend: CpuSimBackend) -> None:
    """Close, however short the backend's own `close_timeout_s` is."""
    for _ in range(1000):
        try:
            return backend.close()
        except DeviceWaitTimeoutError as error:
            last_error = error
    raise last_error


@pytest.fixture
def sim(make_sim: MakeSim) -> CpuSimBackend:
    return make_sim()
