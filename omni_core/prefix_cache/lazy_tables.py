# SPDX-License-Identifier: Apache-2.0
"""Large tables that take memory by the page, as they are written."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from omni_core.backend.host_pages import reserve_pages

_NUMPY_HUGE_PAGES_FROM_BYTES = 1 << 22
"""From this size on numpy asks the kernel for huge pages (2.3: `numpy/_core/src/multiarray/alloc.c`)."""


def zero_table(count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """`count` zeros. No memory until something is written, then a page at a time.

    The first write to a huge page clears 2 MiB, or makes the kernel look for 2 MiB in one piece: 0.7 ms on the engine
    thread, under the state lock, for a key that is new.
    """
    nbytes = count * np.dtype(dtype).itemsize
    if nbytes < _NUMPY_HUGE_PAGES_FROM_BYTES:
        return np.zeros(count, dtype)
    return reserve_pages(nbytes, overcommit=True).numpy().view(dtype)
