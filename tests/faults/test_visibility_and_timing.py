# SPDX-License-Identifier: Apache-2.0
"""Faults 1a: rows that are not there yet, or already someone else's."""

import numpy as np
import pytest
import torch
from cache_rig import SHORT_S, more, new
from row_values import assert_rows

from omni_core.prefix_cache.errors import (
    OmniPrefixCacheStagingTimeoutError,
    StepAlreadyDiscardedError,
    StepAlreadyMaterializedError,
    UnknownStepError,
)


def test_fault_001_same_step_hit_reads_this_steps_rows(rig):
    taken = rig.run(new("A", [5]), new("C", [5, 6], hit=4))
    assert_rows(taken["A"], ("A", 0, 4))
    assert_rows(taken["C"], ("A", 0, 4), ("C", 4, 8))


def test_fault_002_same_step_hit_on_a_recycled_block_never_reads_the_last_tenant(rig):
    rig.run(new("Z", [5]), new("Y", [7]))
    rig.begin(new("A", [5]), new("C", [5, 6], hit=4), new("D", [7, 8], hit=4), finish=["Z", "Y"])
    # D's hit makes the prefetch thread serve this step's read before the forward has brought a row.
    rig.runtime.wait_passed("prefetch.gathered", 1)
    taken = rig.take(rig.save())
    assert_rows(taken["C"], ("A", 0, 4), ("C", 4, 8))
    assert_rows(taken["A"], ("A", 0, 4))
    assert_rows(taken["D"], ("Y", 0, 4), ("D", 4, 8))


def test_fault_004_a_burst_of_equal_prompts_carries_the_same_first_rows(rig):
    taken = rig.run(new("A", [5]), new("C", [5, 6], hit=4), new("D", [5, 7], hit=4))
    assert_rows(taken["A"], ("A", 0, 4))
    assert_rows(taken["C"], ("A", 0, 4), ("C", 4, 8))
    assert_rows(taken["D"], ("A", 0, 4), ("D", 4, 8))


def test_fault_006_a_late_read_never_returns_the_next_tenants_rows(rig):
    rig.run(new("A", [0]))
    with rig.runtime.stop_at("prefetch.landed") as before_gather:
        planned = rig.step(new("C", [0, 1], hit=4))
        before_gather.wait_reached()
        rig.run(new("E", [0]), finish=["A", "C"])
        rig.cache.flush()
    assert_rows(rig.take(planned, "C")["C"], ("A", 0, 4), ("C", 4, 8))
    assert_rows(rig.run(new("F", [0, 2], hit=4))["F"], ("E", 0, 4), ("F", 4, 8))


def test_fault_007_a_hit_waits_for_the_copy_that_still_runs(rig):
    with rig.held():
        first = rig.step(new("A", [5]))
        second = rig.step(new("C", [5, 6], hit=4))
        taker = rig.taking(second, "C")
    assert_rows(taker.result()["C"], ("A", 0, 4), ("C", 4, 8))
    rig.cache.discard_step(first)


def test_fault_008_outputs_overwritten_right_after_the_save_keep_their_values(make_rig):
    rig = make_rig(keys={"codes": ((16,), torch.bfloat16)})
    with rig.held():
        rig.begin(new("A", [5]))
        hidden, codes = rig.rows(pad=2), rig.rows("codes")
        step = rig.save({"codes": codes}, hidden=hidden, keys=(), padded=6)
        hidden.fill_(-7)
        codes.fill_(-7)
    taken = rig.take(step)
    assert_rows(taken["A"], ("A", 0, 4))
    assert_rows(taken["A"], ("A", 0, 4), key="codes", trailing=(16,), dtype=torch.bfloat16)


def test_fault_010_a_late_reader_uses_the_slots_recorded_at_its_step(rig):
    rig.begin(new("A", [1, 2], run=8))
    layout = rig.layout()
    with rig.held():
        step = rig.save(layout=layout)
        # The runner reuses its buffers and rewrites the request's block table before anyone reads the step.
        for array in (layout.slots, layout.positions, layout.starts):
            array[:] = 0
        rig.retable("A", [7, 8])
    assert_rows(rig.take(step)["A"], ("A", 0, 8))
    assert_rows(rig.run(new("C", [1, 2, 3], hit=8))["C"], ("A", 0, 8), ("C", 8, 12))


def test_fault_011_unread_steps_end_in_a_bounded_error_that_names_them(make_rig):
    rig = make_rig(staging_depth=2, staging_claim_timeout_s=SHORT_S)
    first = rig.step(new("A", [1]))
    second = rig.step(more("A", blocks=[2]))
    rig.cache.flush()
    rig.begin(more("A"))
    with pytest.raises(OmniPrefixCacheStagingTimeoutError, match=rf"unread steps \(step {first}, step {second}\)"):
        rig.save()
    rig.take(first, "A")
    third = rig.save()
    for step in (second, third):
        rig.take(step, "A")
    rig.assert_nothing_held()


def test_fault_013_a_step_is_consumed_exactly_once(rig):
    first = rig.step(new("A", [1]))
    rig.take(first, "A")
    second = rig.step(more("A", blocks=[2]))
    rig.cache.discard_step(second)
    for consume in (lambda step: rig.take(step, "A"), rig.cache.discard_step):
        with pytest.raises(StepAlreadyMaterializedError, match=f"step {first} "):
            consume(first)
        with pytest.raises(StepAlreadyDiscardedError, match=f"step {second} "):
            consume(second)
        with pytest.raises(UnknownStepError, match="step 99 "):
            consume(99)


def test_fault_014_slots_claimed_again_while_a_write_is_pending(rig):
    with rig.held():
        first = rig.step(new("A", [0]))
        hit = rig.step(new("C", [0, 1], hit=4))
        third = rig.step(new("E", [0]), finish=["A", "C"])
        takers = [rig.taking(hit, "C", thread="taker-C"), rig.taking(first, "A", thread="taker-A")]
    assert_rows(takers[0].result()["C"], ("A", 0, 4), ("C", 4, 8))
    assert_rows(takers[1].result()["A"], ("A", 0, 4))
    assert_rows(rig.take(third, "E")["E"], ("E", 0, 4))
    assert_rows(rig.run(new("F", [0, 2], hit=4))["F"], ("E", 0, 4), ("F", 4, 8))


def test_fault_010_the_layout_is_asked_for_once_per_step(rig):
    rig.run(new("A", [1, 2], run=6))
    rig.run(more("A", 2))
    assert rig.layout_calls == 2
    assert np.array_equal(rig.layout().slots, [10, 11])
