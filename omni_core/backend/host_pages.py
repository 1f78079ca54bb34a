# SPDX-License-Identifier: Apache-2.0
"""Host memory by the page: address space without memory behind it, memory brought in beforehand, memory really there.

Linux; elsewhere address space is reserved as the system has it, and pages are brought in by touching them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import sys
from collections.abc import Callable

import torch

PAGE_BYTES = mmap.PAGESIZE

_MAP_NORESERVE = 0x4000
"""Linux's flag, from `mman-linux.h`; Python names it from 3.13 on."""
_MADV_POPULATE_WRITE = 23
"""Linux 5.14, from `mman-common.h`: prefault pages writable, keeping what is in them."""
_REFUSALS = frozenset({errno.ENOMEM, errno.EFAULT})
"""Of `MADV_POPULATE_WRITE`: there is no memory. Anything else means that this way of asking is not to be had here."""
_RESIDENT_CHUNK_BYTES = 1 << 30
_DEFAULT_PROBE_BYTES = 32 << 20


@functools.cache
def _libc() -> ctypes.CDLL:
    """The C library: a call through ctypes lets other Python threads run meanwhile; `mmap.madvise` does not."""
    return ctypes.CDLL(None, use_errno=True)


def reserve_pages(nbytes: int, *, overcommit: bool, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Page-aligned address space, flat CPU tensor; memory comes with the first touch of each page.

    Args:
        nbytes: at least 1, and whole elements of `dtype`.
        overcommit: whether more may be reserved than the machine has, to be filled page by page; huge pages, of which
            one touched byte takes 2 MiB, are then declined. `False` lets the operating system refuse at once
            what it could never give, instead of killing the process when the pages are touched.
        dtype: of the tensor.

    Raises:
        MemoryError: the operating system refused; names the size.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (_MAP_NORESERVE if overcommit else 0)
    try:
        reserved = mmap.mmap(-1, nbytes, flags=flags)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"the operating system refused {nbytes} bytes of address space ({error})") from error
    if overcommit and sys.platform == "linux":
        with contextlib.suppress(OSError):  # a kernel without huge pages
            reserved.madvise(mmap.MADV_NOHUGEPAGE)
    with torch.inference_mode(False):  # an inference tensor could not be written by other threads
        return torch.frombuffer(reserved, dtype=dtype)


def commit_pages(pages: torch.Tensor) -> None:
    """Bring the memory behind `pages` in, keeping what is in it. Any thread; other Python threads run meanwhile.

    Nobody else may write to `pages` meanwhile: without `MADV_POPULATE_WRITE` a byte per page is read and written back.

    Args:
        pages: flat uint8 CPU tensor that begins on a page, of `reserve_pages`.

    Raises:
        MemoryError: the operating system has no memory for it. A control group's limit kills instead: check it first.
    """
    if sys.platform != "linux":
        touch_pages(pages)
        return
    address, nbytes = ctypes.c_void_p(pages.data_ptr()), ctypes.c_size_t(pages.numel())
    if _libc().madvise(address, nbytes, ctypes.c_int(_MADV_POPULATE_WRITE)) == 0:
        return
    problem = ctypes.get_errno()
    if problem in _REFUSALS:
        raise MemoryError(f"{pages.numel()} bytes could not be committed ({errno.errorcode.get(problem, problem)})")
    touch_pages(pages)


def touch_pages(pages: torch.Tensor) -> None:
    """As `commit_pages`, on kernels that cannot prefault: a byte of each page is read and written back."""
    with torch.inference_mode(False), torch.no_grad():
        pages[::PAGE_BYTES].bitwise_or_(0)


def resident_bytes(pages: torch.Tensor) -> int:
    """How much of `pages` has memory behind it now. Any thread; asks the kernel about each page.

    Args:
        pages: CPU tensor that begins on a page, of `reserve_pages`.
    """
    nbytes = pages.numel() * pages.element_size()
    resident = 0
    for start in range(0, nbytes, _RESIDENT_CHUNK_BYTES):
        chunk_bytes = min(_RESIDENT_CHUNK_BYTES, nbytes - start)
        states = (ctypes.c_ubyte * -(-chunk_bytes // PAGE_BYTES))()
        if _libc().mincore(ctypes.c_void_p(pages.data_ptr() + start), ctypes.c_size_t(chunk_bytes), states) != 0:
            problem = ctypes.get_errno()
            raise OSError(problem, f"mincore: {errno.errorcode.get(problem, problem)}")
        resident += bytes(states).count(1) * PAGE_BYTES
    return resident


def measure_commit_rate(clock: Callable[[], float], probe_bytes: int = _DEFAULT_PROBE_BYTES) -> float:
    """Bytes per second at which one thread gets fresh memory on this machine now: touches `probe_bytes`, frees them.

    Args:
        clock: seconds, such as `Runtime.monotonic_s`.
        probe_bytes: how much to touch.

    Raises:
        MemoryError: there is no memory for the probe.
    """
    pages = reserve_pages(probe_bytes, overcommit=False)
    began_s = clock()
    commit_pages(pages)
    return probe_bytes / max(clock() - began_s, 1e-9)
