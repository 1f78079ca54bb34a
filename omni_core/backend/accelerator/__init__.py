# SPDX-License-Identifier: Apache-2.0
"""What backends of accelerators share: streams, events, pinned arenas, rings and copies over a vendor's module.

A vendor's package says where its functions are found and how it page-locks memory; `AcceleratorBackend` does the rest.
Short names in comments, such as "backend-facts A1", are sections of the notes on what torch, torch_npu, vLLM and
vllm-ascend really do; `docs/writing-a-backend.md` has what follows from them.
"""

from omni_core.backend.accelerator.backend import CLOSE_TIMEOUT_S, AcceleratorBackend
from omni_core.backend.accelerator.device_module import DeviceModule, NativeEvent, NativeStream
from omni_core.backend.accelerator.events import FIRST_PAUSE_S, LONGEST_PAUSE_S
from omni_core.backend.accelerator.pinning import AllocatedPinning, HostPinning, RegisteredPinning
from omni_core.backend.accelerator.streams import STREAMS_PER_POOL

__all__ = [
    "CLOSE_TIMEOUT_S",
    "FIRST_PAUSE_S",
    "LONGEST_PAUSE_S",
    "STREAMS_PER_POOL",
    "AcceleratorBackend",
    "AllocatedPinning",
    "DeviceModule",
    "HostPinning",
    "NativeEvent",
    "NativeStream",
    "RegisteredPinning",
]
