# SPDX-License-Identifier: Apache-2.0
"""Memory by the page: reserved costs nothing, committed is there with its content, resident is what the kernel says."""

from __future__ import annotations

import time

import pytest
import torch

from omni_core.backend.host_pages import (
    PAGE_BYTES,
    commit_pages,
    measure_commit_rate,
    reserve_pages,
    resident_bytes,
    touch_pages,
)

TIB = 1 << 40


def test_address_space_far_beyond_the_machines_memory_costs_none() -> None:
    pages = reserve_pages(2 * TIB, overcommit=True)
    assert pages.numel() == 2 * TIB
    near_the_end = pages[-64 * PAGE_BYTES :]
    assert resident_bytes(near_the_end) == 0
    near_the_end[5 * PAGE_BYTES] = 7
    assert resident_bytes(near_the_end) == PAGE_BYTES


def test_memory_the_machine_can_never_give_is_refused_at_once_not_at_the_first_touch() -> None:
    with pytest.raises(MemoryError, match=f"refused {64 * TIB} bytes"):
        reserve_pages(64 * TIB, overcommit=False)


@pytest.mark.parametrize("commit", [commit_pages, touch_pages])
@pytest.mark.parametrize("nbytes", [PAGE_BYTES, 5 * PAGE_BYTES, 5 * PAGE_BYTES + 1])
def test_committing_brings_every_page_in_and_keeps_what_is_there(commit, nbytes: int) -> None:
    pages = reserve_pages(nbytes, overcommit=True)
    pages[0], pages[-1] = 3, 250
    commit(pages)
    assert resident_bytes(pages) == -(-nbytes // PAGE_BYTES) * PAGE_BYTES
    assert (pages[0], pages[-1], int(pages.sum(dtype=torch.int64))) == (3, 250, 253)


def test_the_rate_is_bytes_over_the_clocks_seconds() -> None:
    readings = iter([10.0, 10.5])
    assert measure_commit_rate(lambda: next(readings), probe_bytes=1 << 20) == 2 << 20
    assert measure_commit_rate(time.monotonic, probe_bytes=1 << 20) > 0
