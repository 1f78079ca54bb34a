# SPDX-License-Identifier: Apache-2.0
"""Faults of preempted, resumed, replaced and drafted requests (faults.md, 1b and 1d)."""

import logging

import torch
from cache_rig import back, more, new, replaced
from row_values import assert_rows, row_values

from omni_core.prefix_cache.errors import ContentReplacedError, HitRowsAbsentError
from omni_core.prefix_cache.policy import ModelCachePolicy


def test_fault_018_a_resumed_request_gets_its_fresh_hit_and_its_new_rows_once_each(rig):
    rig.run(new("Z", [1, 2], run=8))
    assert_rows(rig.run(new("A", [3], run=4))["A"], ("A", 0, 4))
    assert_rows(rig.run(back("A", [1, 2, 7], hit=8, run=4))["A"], ("Z", 4, 8), ("A", 8, 12))


def test_fault_020_replayed_rows_are_not_appended_again(make_rig):
    """71 codec rows for a 39-token sequence: an accumulator that only appends keeps what a replay computes again."""
    rig = make_rig(keys={"codes": ((4,), torch.float32)}, policy=ModelCachePolicy(token_keys={"codes"}))
    taken = [rig.run(new("A", [1, 2], run=8)), rig.run(back("A", [3], run=4)), rig.run(more("A", 8, blocks=[4, 5]))]
    together = torch.cat([outputs["A"]["codes"] for outputs in taken])
    assert torch.equal(together, row_values("A", range(12), "codes", (4,)))
    assert [outputs["A"].ranges for outputs in taken] == [((0, 8),), (), ((8, 12),)]


def test_fault_023_a_replayed_value_without_a_row_per_token_is_an_error_and_not_a_guess(make_rig, caplog):
    rig = make_rig(keys={"codes": ((4,), torch.float32)}, policy=ModelCachePolicy(token_keys={"codes"}))
    rig.run(new("A", [1, 2], run=6))
    five_rows = torch.full((5, 4), 7.0)
    with caplog.at_level(logging.ERROR, logger="omni_core"):
        taken = rig.run(back("A", [3, 4], run=4), keys=[], outputs={"codes": five_rows})
    assert "key 'codes' was understood to have a row per token" in caplog.text
    assert "codes" not in taken["A"].rows
    assert torch.equal(taken["A"].leftovers["codes"], five_rows)


def test_fault_024_an_async_chunk_continuation_is_no_hit(rig):
    rig.run(new("A", [1, 2], run=8))
    assert_rows(rig.run(new("A", [1, 2, 3], hit=8, run=4))["A"], ("A", 8, 12))


def test_fault_028_a_request_may_come_back_while_its_writes_are_open(rig):
    with rig.held():
        first = rig.step(new("A", [1, 2], run=6))
        second = rig.step(back("A", [1, 7], hit=4, run=3))
    assert_rows(rig.take(second, "A")["A"], ("A", 6, 7))
    assert_rows(rig.take(first, "A")["A"], ("A", 0, 6))


def test_fault_064_rows_of_rejected_drafts_are_not_handed_on(rig):
    rig.run(new("A", [1, 2], run=4))
    assert_rows(rig.run(more("A", 4, drafts=3), counts={"A": 2})["A"], ("A", 4, 6))


def test_fault_066_a_stale_block_hash_does_not_serve_the_new_contents_rows(rig):
    rig.run(new("A", [1], run=4))
    rig.run(replaced("A", [1], hit=3, run=1, content="A7"))
    assert isinstance(rig.run(new("D", [1, 2], hit=4, run=1)).failed["D"], HitRowsAbsentError)


def test_fault_068_of_several_replacements_only_the_last_version_exists(rig):
    old = rig.step(new("A", [1], run=4))
    rig.begin(events=rig.schedule(replaced("A", [2], run=1, content="A2")))
    step = rig.step(replaced("A", [3], run=3, content="A3"))
    assert isinstance(rig.take(old, "A").failed["A"], ContentReplacedError)
    assert_rows(rig.take(step, "A")["A"], ("A3", 0, 3))
    rig.begin(finish=["A"])
    assert rig.cache.take_partial_requests() == ()


def test_fault_073_a_reloaded_adapters_old_rows_are_not_served_and_others_are(rig):
    rig.run(new("X", [1], adapter=7), new("A", [2]))
    assert rig.cache.bump_adapter_version(7).rows_absent["__hidden_states__"] == 4
    taken = rig.run(new("Y", [1, 3], hit=4, adapter=7), new("B", [2, 4], hit=4))
    assert isinstance(taken.failed["Y"], HitRowsAbsentError)
    assert_rows(taken["B"], ("A", 0, 4), ("B", 4, 8))


def test_fault_073_two_ids_of_one_name_share_no_rows(rig):
    rig.run(new("X", [1], adapter=7))
    assert isinstance(rig.run(new("Y", [1, 2], hit=4, adapter=8)).failed["Y"], HitRowsAbsentError)


def test_fault_074_after_a_weight_update_no_old_row_is_served_and_requests_go_on(rig):
    rig.run(new("A", [1, 2]))
    assert rig.cache.bump_weight_version().rows_absent["__hidden_states__"] == 4
    taken = rig.run(more("A", 4), new("C", [1, 3], hit=4))
    assert_rows(taken["A"], ("A", 4, 8))
    assert isinstance(taken.failed["C"], HitRowsAbsentError)
