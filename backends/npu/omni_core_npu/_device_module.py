# SPDX-License-Identifier: Apache-2.0
"""`torch.npu`, and how torch_npu comes into this process.

Nobody is known to replace anything in `torch.npu`; it is what others put in the place of `torch.cuda`. Its classes are
taken from torch's table of device modules, never from `torch.cuda`, `torch.Event` or `torch.Stream`: on Ascend those
are stand-ins, and a generic `torch.Stream` waits for a `torch.npu.Event` by doing nothing (backend-facts A4).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch

_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def native_module() -> Any:
    """`torch.npu`. Imports torch_npu if nobody has; only after `unavailable_reason()` said that it works.

    A `DeviceModule`, but for mypy, to which torch_npu is unknown.
    """
    if "torch_npu" not in sys.modules:
        with _autoload_setting_kept():
            import_module("torch_npu")  # it registers itself with torch
    return torch.get_device_module("npu")


@contextmanager
def _autoload_setting_kept() -> Iterator[None]:
    """torch_npu sets it, for child processes too, and to other values than it was set to (backend-facts B)."""
    before = os.environ.get(_AUTOLOAD)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_AUTOLOAD, None)
        else:
            os.environ[_AUTOLOAD] = before
