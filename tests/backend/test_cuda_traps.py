# SPDX-License-Identifier: Apache-2.0
"""What only CUDA does: errors that stick to a thread or a device, a version that torch does not tell."""

from __future__ import annotations

import pytest
import torch
from fake_accelerator.backends import Vendor
from fake_accelerator.rig import FakeRig
from omni_core_cuda import driver_version

from omni_core.backend.host_pages import PAGE_BYTES


@pytest.fixture
def cuda(make_rig) -> FakeRig:
    return make_rig(Vendor.CUDA)


def test_a_refused_pin_is_not_reported_by_the_next_innocent_launch(cuda: FakeRig) -> None:
    cuda.machine.max_pin_bytes = 1
    status = cuda.module.cudart.cudaHostRegister(0, PAGE_BYTES, 0)
    assert status != cuda.module.cudart.cudaError.success
    with pytest.raises(RuntimeError, match="out of memory"):  # what the runtime does by itself
        torch.empty(1).fill_(0)
    with pytest.raises(MemoryError, match=r"cudaHostRegister: out of memory; set pin_chunk_bytes"):
        cuda.backend.pinned_arena(PAGE_BYTES)
    torch.empty(1).fill_(0)


def test_a_refused_unlock_is_not_reported_by_the_next_innocent_launch(cuda: FakeRig) -> None:
    arena = cuda.backend.pinned_arena(PAGE_BYTES)
    cuda.machine.unregister(arena.buffer.data_ptr())
    arena.close()
    torch.empty(1).fill_(0)


def test_a_pin_is_registered_to_the_byte(cuda: FakeRig) -> None:
    cuda.machine.pins.clear()
    cuda.backend.pinned_arena(PAGE_BYTES + 1)
    assert [nbytes for _, nbytes in cuda.machine.pins] == [PAGE_BYTES + 1]


@pytest.mark.parametrize(
    ("stated", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\nGCC 12.2.0",
            "550.54.15",
        ),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.126  Release Build", "580.126"),
        ("something else", None),
        (None, None),
    ],
)
def test_the_drivers_version_is_what_the_kernel_states(tmp_path, stated, version) -> None:
    path = tmp_path / "version"
    if stated is not None:
        path.write_text(stated)
    assert driver_version(path) == version
