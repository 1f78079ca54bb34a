# SPDX-License-Identifier: Apache-2.0
"""Simulators, and backends on fake machines, that are closed when their test ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from fake_accelerator.backends import VENDORS, Vendor
from fake_accelerator.rig import FakeRig
from fake_accelerator.torch_patches import torch_on
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


MakeRig = Callable[..., FakeRig]


@pytest.fixture
def make_rig() -> Iterator[MakeRig]:
    """Makes backends on fake machines; at the end no machine may have seen bytes go wrong."""
    rigs: list[FakeRig] = []
    with ExitStack() as patched:

        def make(vendor: Vendor, **options) -> FakeRig:
            machine = vendor.machine()
            patched.enter_context(torch_on(machine))
            rigs.append(FakeRig(vendor, machine, **options))
            return rigs[-1]

        yield make
        for rig in rigs:
            rig.backend.close()
    assert [fault for rig in rigs for fault in rig.machine.faults] == []


@pytest.fixture(params=VENDORS, ids=lambda vendor: vendor.value)
def rig(request: pytest.FixtureRequest, make_rig: MakeRig) -> FakeRig:
    """Each vendor's backend."""
    return make_rig(request.param)
