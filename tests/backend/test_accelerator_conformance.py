# SPDX-License-Identifier: Apache-2.0
"""`cuda` and `npu` pass the suite every backend passes, on fake machines that behave as the vendors' runtimes do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_accelerator.backends import Vendor
from fake_accelerator.machine import FakeMachine
from fake_accelerator.torch_patches import torch_on

from omni_core.backend import DeviceBackend
from omni_core.backend.conformance import BackendConformance
from omni_core.runtime import Runtime


class OnAFakeMachine(BackendConformance):
    vendor: Vendor
    throughput_nbytes = 1 << 20

    @pytest.fixture(autouse=True)
    def machine(self) -> Iterator[FakeMachine]:
        self._machine = self.vendor.machine()
        with torch_on(self._machine):
            yield self._machine
        assert self._machine.faults == []

    def make_backend(self, runtime: Runtime) -> DeviceBackend:
        self._machine.set_device(0)
        return self.vendor.backend(self._machine, runtime)

    def skip_reason(self) -> None:
        return None


class TestCuda(OnAFakeMachine):
    vendor = Vendor.CUDA


class TestNpu(OnAFakeMachine):
    vendor = Vendor.NPU


class TestOlderNpu(OnAFakeMachine):
    """torch_npu before 2.14, whose pins are torch's."""

    vendor = Vendor.OLDER_NPU
