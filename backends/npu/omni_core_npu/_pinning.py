# SPDX-License-Identifier: Apache-2.0
"""Page-locking through CANN: `npuHostRegister`, exact to the byte, where torch_npu has it; else torch's allocator."""

from __future__ import annotations

from typing import Any

from omni_core.backend import BackendError
from omni_core.backend.accelerator import AllocatedPinning, HostPinning, RegisteredPinning
from omni_core.backend.host_pages import PAGE_BYTES

_ACL_HOST_REG_MAPPED = 0x2
"""`ACL_HOST_REG_MAPPED`: page-locked and mapped for the device. Pinned only (0x10000000) is said to copy at a third of
the speed above some size (DeepSpeed, `accelerator/npu_accelerator.py`); not measured here."""
_ACL_SUCCESS = 0


def host_pinning(npu: Any) -> HostPinning:
    """The way of this torch_npu: `npurt` came with 2.14 (backend-facts A1). The one place that asks."""
    missing = AllocatedPinning(missing="torch.npu.npurt().npuHostRegister (torch_npu 2.14)")
    if not hasattr(npu, "npurt"):
        return missing
    try:
        npurt = npu.npurt()
    except RuntimeError:  # a build of 2.14 without it says so only here (`torch_npu/npu/__init__.py`)
        return missing

    def register(address: int, nbytes: int) -> None:
        # Whole pages: both ends of a mapped range lie on one.
        status = int(npurt.npuHostRegister(address, -(-nbytes // PAGE_BYTES) * PAGE_BYTES, _ACL_HOST_REG_MAPPED))
        if status != _ACL_SUCCESS:
            raise MemoryError(
                f"npuHostRegister: ACL error {status}; set pin_chunk_bytes to less, and see the limits of the "
                "container and `ulimit -l`"
            )

    def unregister(address: int, nbytes: int) -> None:
        status = int(npurt.npuHostUnregister(address))
        if status != _ACL_SUCCESS:
            raise BackendError(f"npuHostUnregister of {nbytes} bytes at {address:#x}: ACL error {status}")

    return RegisteredPinning(register, unregister)
