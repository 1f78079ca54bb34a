# SPDX-License-Identifier: Apache-2.0
"""Large tables that take memory by the page, as they are written."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from omni_core.backend.host_pages import reserve_pages

_WriteIds = npt.NDArray[np.int64]

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


class KeyTables:
    """A claim and a stamp table for each new key: made when its policy is registered, else at its first save.

    They are alike for every key, so a key's name is all that must be known. Engine thread only; no lock needed.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._ready: dict[str, tuple[_WriteIds, _WriteIds]] = {}

    def reserve(self, keys: Iterable[str]) -> None:
        """Make the tables of these keys, and of no others, beforehand.

        Address space that is refused is no error here: the save that first brings the key tries again, and tells.
        """
        self._ready.clear()
        with contextlib.suppress(MemoryError):
            for key in keys:
                self._ready[key] = self._make()

    def of_new(self, key: str) -> tuple[_WriteIds, _WriteIds]:
        """Zeroed `(num_slots,)` tables for a key that has none. The same ones until `taken`.

        Raises:
            MemoryError: the operating system has not so much address space.
        """
        return self._ready.get(key) or self._make()

    def taken(self, key: str) -> None:
        """The key's tables are in use: nobody gets them again."""
        self._ready.pop(key, None)

    def _make(self) -> tuple[_WriteIds, _WriteIds]:
        return zero_table(self._num_slots, np.int64), zero_table(self._num_slots, np.int64)
