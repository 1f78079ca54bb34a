# SPDX-License-Identifier: Apache-2.0
"""The fakes under names of their own, for distributions that tests install."""

from fake_accelerator.backends import FakeCudaBackend, FakeNpuBackend


class RegisteredFakeCuda(FakeCudaBackend):
    """As `fake_cuda`; wants the option `device_module`."""

    name = "fake_cuda"


class RegisteredFakeNpu(FakeNpuBackend):
    """As `fake_npu`; wants the option `device_module`."""

    name = "fake_npu"
