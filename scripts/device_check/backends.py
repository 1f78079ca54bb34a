# SPDX-License-Identifier: Apache-2.0
"""The backends of this repository, straight from their folders: on a device machine no distribution is installed."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from omni_core.backend import DeviceBackend
from omni_core.runtime import Runtime


@dataclass(frozen=True, slots=True)
class CheckedBackend:
    """A backend that the check can be run on."""

    name: str
    module: str
    class_name: str
    graph_class: str | None
    """The class of captured graphs in torch's module of the device; `None`: graphs are emulated."""
    synchronizes_before_replay: bool = False
    """As vLLM-Ascend does before a replay, because of an ordering hang (its PR 4233)."""
    race_options: Mapping[str, Any] = field(default_factory=dict)
    """Options for the race hunt: a simulator's copies are made slow, in parts."""

    def load(self) -> type[DeviceBackend]:
        """Import it."""
        loaded: type[DeviceBackend] = getattr(importlib.import_module(self.module), self.class_name)
        return loaded

    def make(self, runtime: Runtime) -> DeviceBackend:
        """A fresh one."""
        return self.load()(runtime)

    def make_for_races(self, runtime: Runtime) -> DeviceBackend:
        """A fresh one with `race_options`."""
        return self.load()(runtime, **self.race_options)


BACKENDS = (
    CheckedBackend("cuda", "omni_core_cuda", "CudaBackend", "CUDAGraph"),
    CheckedBackend("npu", "omni_core_npu", "NpuBackend", "NPUGraph", synchronizes_before_replay=True),
    CheckedBackend(
        "cpu_sim",
        "omni_core_cpu_sim",
        "CpuSimBackend",
        None,
        race_options={"copy_latency_s": 0.0005, "copy_parts": 3, "copy_bandwidth_bytes_per_s": 1e9},
    ),
)
"""In the order they are tried if none is named."""


def choose(name: str | None) -> CheckedBackend:
    """The backend of that name; unnamed: the first that this machine can run.

    Raises:
        SystemExit: the machine cannot run it; says why.
    """
    reasons = []
    for backend in BACKENDS:
        if name in (None, backend.name):
            reason = backend.load().unavailable_reason()
            if reason is None:
                return backend
            reasons.append(f"{backend.name}: {reason}")
    raise SystemExit(f"device_check: no backend to check. {'; '.join(reasons)}")
