# SPDX-License-Identifier: Apache-2.0
"""Rows of every dtype are joined bit for bit, also of those torch has no indexing operations for on a CPU."""

import pytest
import torch
from cache_rig import more, new
from row_values import assert_rows

from omni_core.prefix_cache.config import HIDDEN_KEY

DTYPES = [
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
    torch.bfloat16,
    torch.complex64,
]
NAMES = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
WIDTHS = [1, 3, 4]
"""Rows that are moved as their own elements, as bytes, and as wide words."""


def patterned(count, width, dtype, seed):
    """Rows whose every byte tells where it belongs; bits only, so any dtype can have them."""
    codes = (torch.arange(count * width * dtype.itemsize) * 7 + seed) % 251
    return (codes % 2 if dtype is torch.bool else codes).to(torch.uint8).view(dtype).reshape(count, width)


def assert_same_bits(found, *parts):
    assert found.dtype == parts[0].dtype
    assert found.shape == (sum(len(part) for part in parts), parts[0].shape[1])
    assert torch.equal(found.view(torch.uint8), torch.cat([part.view(torch.uint8) for part in parts]))


def zeros(count, width, dtype):
    return torch.zeros(count, width * dtype.itemsize, dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)
def test_rows_that_are_partly_absent_behind_a_hit_read_zeros(rig, dtype, width):
    stored, own = patterned(4, width, dtype, 1), patterned(4, width, dtype, 2)
    rig.begin(new("A", [1]))
    rig.take(rig.save({"codes": stored}))
    rig.run(more("A", 4, blocks=[2]))
    rig.begin(new("C", [1, 2, 3], hit=8))
    rows = rig.take(rig.save({"codes": own}))["C"]
    assert rows.zero_ranges == {"codes": ((4, 8),)}
    assert_same_bits(rows["codes"], stored, zeros(4, width, dtype), own)


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)
def test_rows_all_absent_behind_a_hit_or_in_the_step_read_zeros(rig, dtype):
    rig.run(new("A", [1]))
    rig.begin(new("C", [1, 2], hit=4))
    own = patterned(4, 3, dtype, 2)
    rows = rig.take(rig.save({"codes": own}))["C"]
    assert_same_bits(rows["codes"], zeros(4, 3, dtype), own)
    # The step after brings no row of the key for its own tokens.
    rows = rig.run(new("E", [1, 2, 4], hit=8))["E"]
    assert_same_bits(rows["codes"], zeros(4, 3, dtype), own, zeros(4, 3, dtype))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)
def test_rows_set_aside_before_they_were_overwritten_are_joined(rig, dtype, width):
    stored, own, late = (patterned(4, width, dtype, seed) for seed in (1, 2, 3))
    rig.begin(new("A", [1]))
    rig.take(rig.save({"codes": stored}))
    rig.cache.flush()
    rescued = rig.cache.stats().rows_rescued
    with rig.runtime.stop_at("prefetch.landed") as gathering:
        rig.begin(new("C", [1, 2], hit=4))
        step = rig.save({"codes": own})
        gathering.wait_reached()
        rig.begin(new("E", [1]), finish=["A"])
        rig.save({"codes": late})
        rig.cache.flush()
    assert rig.cache.stats().rows_rescued > rescued
    rows = rig.take(step, "C")["C"]
    assert_rows(rows, ("A", 0, 4), ("C", 4, 8))
    assert_same_bits(rows["codes"], stored, own)


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)
def test_hidden_rows_of_every_dtype_are_rescued_and_joined(make_rig, dtype):
    rig = make_rig(dtype=dtype)
    stored, own, late = (patterned(4, 3, dtype, seed) for seed in (1, 2, 3))
    rig.begin(new("A", [1]))
    rig.take(rig.save(hidden=stored))
    rig.cache.flush()
    with rig.runtime.stop_at("prefetch.landed") as gathering:
        rig.begin(new("C", [1, 2], hit=4))
        step = rig.save(hidden=own)
        gathering.wait_reached()
        rig.begin(new("E", [1]), finish=["A"])
        rig.save(hidden=late)
        rig.cache.flush()
    rows = rig.take(step, "C")["C"]
    assert_same_bits(rows[HIDDEN_KEY], stored, own)
