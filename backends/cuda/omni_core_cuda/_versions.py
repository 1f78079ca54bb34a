# SPDX-License-Identifier: Apache-2.0
"""Which software lies under torch on a CUDA machine."""

from __future__ import annotations

import re
from pathlib import Path

import torch

_DRIVER = Path("/proc/driver/nvidia/version")
"""The kernel module's own statement; torch has no function that tells."""


def software() -> dict[str, str]:
    """Versions by name; what cannot be found out is left out."""
    versions = {"driver": driver_version(_DRIVER), "CUDA runtime": torch.version.cuda}
    return {name: version for name, version in versions.items() if version is not None}


def driver_version(stated: Path) -> str | None:
    """The version of NVIDIA's kernel module, from its own statement; `None` if it says nothing."""
    try:
        first_line = stated.read_text().partition("\n")[0]
    except OSError:
        return None
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", first_line)
    return found[0] if found else None
