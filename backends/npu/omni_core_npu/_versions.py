# SPDX-License-Identifier: Apache-2.0
"""Which software lies under torch on an Ascend machine."""

from __future__ import annotations

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any


def software(npu: Any) -> dict[str, str]:
    """Versions by name, as torch_npu tells them; one that it cannot find out is left out."""
    versions = {}
    for name, module in (("driver", "DRIVER"), ("CANN", "CANN")):
        try:
            told = npu.utils.get_cann_version(module)
        except Exception:  # of any type: CANN's files are read, and differ between releases
            continue
        if told:
            versions[name] = str(told)
    with suppress(PackageNotFoundError):
        versions["torch_npu"] = version("torch_npu")
    return versions
