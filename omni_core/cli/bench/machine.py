# SPDX-License-Identifier: Apache-2.0
"""On what it was measured."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch

import omni_core

_GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
_CPU_INFO = Path("/proc/cpuinfo")
_NOT_READABLE = "not readable"


def machine_facts() -> dict[str, Any]:
    """What a figure depends on and its reader cannot see."""
    return {
        "device": "CPU (simulated backend; no accelerator was measured)",
        "cpu_model": _cpu_model(),
        "cores": os.cpu_count(),
        "cores_usable": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "governor": _read(_GOVERNOR),
        "load_average": list(os.getloadavg()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "numpy": np.__version__,
        "omni_core": omni_core.__version__,
    }


def _cpu_model() -> str:
    for line in _read(_CPU_INFO).splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or _NOT_READABLE


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return _NOT_READABLE
