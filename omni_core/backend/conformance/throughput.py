# SPDX-License-Identifier: Apache-2.0
"""How many bytes a second come to the host: a figure, no verdict. What is fast enough depends on the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from omni_core.backend.base import DeviceBackend
from omni_core.backend.conformance.rig import MIB, WAIT_S, BackendFactory, Rig, require_equal
from omni_core.runtime import Runtime, ThreadingRuntime

DEFAULT_NBYTES = 64 * MIB
"""Large enough that starting a copy does not count."""
_DEFAULT_ROUNDS = 8
_PATTERN = 251
"""A prime below 256: no two neighbouring copies of it coincide."""


@dataclass(frozen=True, slots=True)
class CopyThroughput:
    """Bytes per second, device to host, each the best of several copies."""

    nbytes: int
    """Of one copy."""
    pinned_bytes_per_s: float
    """By `copy_to_host` into an arena, up to the end of `synchronize`: what the cache does."""
    pageable_bytes_per_s: float
    """By torch alone into ordinary memory: what the cache saves."""


def measure_throughput(
    factory: BackendFactory, *, nbytes: int = DEFAULT_NBYTES, rounds: int = _DEFAULT_ROUNDS
) -> CopyThroughput:
    """Copy `nbytes` some times in both ways. Blocks for a second or so; takes `nbytes` of device memory.

    Args:
        factory: makes a fresh backend.
        nbytes: of one copy.
        rounds: copies in each way, after one that is not counted.

    Raises:
        AssertionError: bytes did not arrive as they were.
    """
    runtime = ThreadingRuntime()
    with Rig.opened(factory, runtime) as rig:
        expected = (torch.arange(nbytes, dtype=torch.int32) % _PATTERN).to(torch.uint8)
        source = rig.on_device(expected)
        pinned = rig.page(nbytes).take((nbytes,), torch.uint8)
        pageable = torch.empty(nbytes, dtype=torch.uint8)
        stream = rig.stream("throughput")

        def copy_pinned() -> None:
            rig.backend.copy_to_host(pinned, source, stream).synchronize(WAIT_S)

        def copy_pageable() -> None:
            pageable.copy_(source)
            _wait_for_producer(rig.backend)

        pinned_s = _best_seconds(runtime, copy_pinned, rounds)
        pageable_s = _best_seconds(runtime, copy_pageable, rounds)
        require_equal(pinned, expected, "bytes of the pinned copies")
        require_equal(pageable, expected, "bytes of the pageable copies")
        return CopyThroughput(nbytes, nbytes / pinned_s, nbytes / pageable_s)


def _wait_for_producer(backend: DeviceBackend) -> None:
    backend.current_stream().record().synchronize(WAIT_S)


def _best_seconds(runtime: Runtime, copy: Callable[[], None], rounds: int) -> float:
    copy()
    seconds = []
    for _ in range(rounds):
        started_s = runtime.monotonic_s()
        copy()
        seconds.append(runtime.monotonic_s() - started_s)
    return max(min(seconds), 1e-9)
