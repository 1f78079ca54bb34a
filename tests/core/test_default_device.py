# SPDX-License-Identifier: Apache-2.0
"""Rows lie in CPU memory whatever the calling thread's default device is; engines and loaders change it."""

import torch
from cache_rig import new
from row_values import assert_rows

CODES = {"codes": ((2, 2), torch.int16)}


def test_rows_are_cpu_tensors_under_another_default_device(make_rig):
    with torch.device("meta"):
        rig = make_rig()
    rig.run(new("A", [1]))
    step = rig.step(new("C", [1, 2], hit=4), new("D", [3]), new("E", [4]))
    with torch.device("meta"):
        taken = rig.take(step)
    assert taken.failed == {}
    for rows in taken.values():
        assert rows.hidden_states.is_cpu
    assert_rows(taken["C"], ("A", 0, 4), ("C", 4, 8))
    assert_rows(taken["D"], ("D", 0, 4))
    assert_rows(taken["E"], ("E", 0, 4))


def test_a_step_saved_under_another_default_device_is_stored_and_joined(make_rig):
    rig = make_rig(keys=CODES)
    for runs in ((new("A", [1]), new("B", [2])), (new("C", [1, 3], hit=4), new("D", [4], run=2))):
        rig.begin(*runs)
        hidden, codes = rig.rows(), rig.rows("codes")
        lists = [torch.full((2,), 1.0), torch.full((3,), 2.0)]
        with torch.device("meta"):
            taken = rig.take(rig.save({"codes": codes, "each": lists}, keys=(), hidden=hidden))
    assert torch.equal(taken["D"].leftovers["each"], torch.full((3,), 2.0))
    for key, form in rig.keys.items():
        assert_rows(taken["C"], ("A", 0, 4), ("C", 4, 8), key=key, trailing=form[0], dtype=form[1])
        assert_rows(taken["D"], ("D", 0, 2), key=key, trailing=form[0], dtype=form[1])
