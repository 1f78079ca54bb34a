# SPDX-License-Identifier: Apache-2.0
"""Bytes per second to the host: the backend's copies beside torch's own into page-locked and ordinary memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from device_check.backends import CheckedBackend
from omni_core.backend.conformance import measure_throughput
from omni_core.runtime import ThreadingRuntime

_MIB = 1 << 20
_ROUNDS = 10


def measure_bandwidth(checked: CheckedBackend, device: torch.device, sizes_mib: Sequence[int]) -> dict[str, Any]:
    """One line per size; the best of several copies each."""
    lines = []
    for size_mib in sizes_mib:
        nbytes = size_mib * _MIB
        ours = measure_throughput(checked.make, nbytes=nbytes, rounds=_ROUNDS)
        raw = _raw_pinned_bytes_per_s(device, nbytes)
        lines.append(
            {
                "mib": size_mib,
                "backend_gb_per_s": round(ours.pinned_bytes_per_s / 1e9, 3),
                "raw_pinned_gb_per_s": round(raw / 1e9, 3),
                "pageable_gb_per_s": round(ours.pageable_bytes_per_s / 1e9, 3),
                "backend_to_raw": round(ours.pinned_bytes_per_s / raw, 3),
            }
        )
    return {"ok": True, "copies": lines}


def _raw_pinned_bytes_per_s(device: torch.device, nbytes: int) -> float:
    """Torch alone, with nothing between it and the driver; on a CPU, into ordinary memory."""
    runtime = ThreadingRuntime()
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    destination = torch.empty(nbytes, dtype=torch.uint8)
    module = None if device.type == "cpu" else torch.get_device_module(device.type)
    if module is not None:
        destination = destination.pin_memory()
    seconds = []
    for _ in range(_ROUNDS + 1):
        started_s = runtime.monotonic_s()
        destination.copy_(source, non_blocking=True)
        if module is not None:
            module.current_stream().synchronize()
        seconds.append(runtime.monotonic_s() - started_s)
    return nbytes / max(min(seconds[1:]), 1e-9)
