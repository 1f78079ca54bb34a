# SPDX-License-Identifier: Apache-2.0
"""Rows of a content that is gone are found nowhere: not in a copy of their block, not under a key nobody rewrote."""

import pytest
import torch
from cache_rig import more, new, replaced
from row_values import assert_rows, row_values

from omni_core.prefix_cache.errors import HitRowsAbsentError

CODES = {"codes": ((4,), torch.bfloat16)}


@pytest.mark.parametrize("hit", [2, 4])
def test_a_copy_of_a_block_that_is_private_to_one_request_serves_nobody_else(rig, hit):
    rig.run(new("A", [1, 2], run=6))
    rig.run(replaced("A", [1, 5], hit=2, run=3, content="A2"))
    taken = rig.run(new("D", [7, 8], hit=hit), copies=[(1, 7)])
    assert isinstance(taken.failed["D"], HitRowsAbsentError)


def assert_codes_then_zeros(rows, req_id, stop, end):
    """Rows of `req_id` up to `stop`, and zeros from there to `end`."""
    assert rows.zero_ranges["codes"] == ((stop, end),)
    codes = rows["codes"]
    assert torch.equal(codes[:stop], row_values(req_id, range(stop), "codes", (4,), torch.bfloat16))
    assert not codes[stop:end].any()


def test_a_rejected_drafts_row_is_gone_under_every_key(make_rig):
    rig = make_rig(keys=CODES)
    rig.run(new("A", [1, 2], run=4))
    rig.run(more("A", 4, drafts=3), counts={"A": 1})
    rig.run(more("A", 3, at=5), keys=[])
    rows = rig.run(new("C", [1, 2, 3], hit=8, run=1), keys=[])["C"]
    assert_rows(rows, ("A", 0, 8), ("C", 8, 9))
    assert_codes_then_zeros(rows, "A", 5, 9)


def test_a_replaced_contents_row_is_gone_under_every_key(make_rig):
    rig = make_rig(keys=CODES)
    rig.run(new("A", [1], run=4))
    rig.run(replaced("A", [1], hit=2, run=2, content="A2"), keys=[])
    # The block is private to A now: only A can hit it.
    rows = rig.run(replaced("A", [1, 3], hit=4, run=1, content="A2"), keys=[])["A"]
    assert_rows(rows, ("A", 0, 2), ("A2", 2, 5))
    assert_codes_then_zeros(rows, "A", 2, 5)
