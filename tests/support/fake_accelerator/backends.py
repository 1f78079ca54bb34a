# SPDX-License-Identifier: Apache-2.0
"""The product's backends on fake machines. Nothing of theirs is replaced but the device module they are given."""

from contextlib import AbstractContextManager
from enum import Enum

import omni_core_cuda
import omni_core_npu

from fake_accelerator.fake_torch_cuda import Binding, CudaModule
from fake_accelerator.fake_torch_npu import NpuModule, OlderNpuModule
from fake_accelerator.machine import FakeMachine
from omni_core.backend.accelerator import AcceleratorBackend
from omni_core.runtime import Runtime, ThreadingRuntime


class OnFakeMachine:
    """Owns ordinary memory, and can be asked to hold copies back (`HoldsCopies`)."""

    device_type = "cpu"
    machine: FakeMachine

    @classmethod
    def unavailable_reason(cls) -> None:
        return None

    def hold_copies(self) -> AbstractContextManager[None]:
        return self.machine.hold_copies()


class FakeCudaBackend(OnFakeMachine, omni_core_cuda.CudaBackend):
    """`CudaBackend` on a fake machine."""


class FakeNpuBackend(OnFakeMachine, omni_core_npu.NpuBackend):
    """`NpuBackend` on a fake machine."""


class Vendor(Enum):
    """The fakes."""

    CUDA = "cuda"
    NPU = "npu"
    OLDER_NPU = "npu before 2.14"

    def machine(self, **options) -> FakeMachine:
        """A machine whose calling thread was given device 0, as a worker of vLLM does with its main thread."""
        if self is Vendor.CUDA:
            machine = FakeMachine(host_task_queue=False, default_device=0, **options)
            machine.sticky = True
        else:
            machine = FakeMachine(host_task_queue=True, default_device=None, **options)
        machine.set_device(0)
        return machine

    def device_module(self, machine: FakeMachine):
        """What the backend is given in the place of the vendor's module."""
        if self is Vendor.CUDA:
            return omni_core_cuda.CudaModule(CudaModule(machine), Binding(machine))
        return (NpuModule if self is Vendor.NPU else OlderNpuModule)(machine)

    @property
    def backend_class(self) -> type[OnFakeMachine]:
        """The product's, on a fake machine."""
        return FakeCudaBackend if self is Vendor.CUDA else FakeNpuBackend

    def backend(self, machine: FakeMachine, runtime: Runtime | None = None, **options) -> AcceleratorBackend:
        """The backend for the calling thread's device."""
        options.setdefault("device_module", self.device_module(machine))
        backend = self.backend_class(runtime or ThreadingRuntime(), **options)
        backend.machine = machine
        return backend


VENDORS = (Vendor.CUDA, Vendor.NPU)
"""Those with exact pins."""
