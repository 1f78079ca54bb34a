# SPDX-License-Identifier: Apache-2.0
"""A new version of the weights, or an adapter: what was stored before is served to no later step; nothing else ends."""

import logging

import pytest
import torch
from cache_rig import back, more, new, replaced
from row_values import assert_rows, row_values

from omni_core.prefix_cache.config import HIDDEN_KEY
from omni_core.prefix_cache.errors import CacheClosedError, HitRowsAbsentError, RequestEventError
from omni_core.prefix_cache.events import RequestEvent, RequestEventKind
from omni_core.prefix_cache.policy import ModelCachePolicy

VOICE, OTHER = 7, 8


def is_absent(taken, *req_ids):
    return all(isinstance(taken.failed.get(req_id), HitRowsAbsentError) for req_id in req_ids)


# -- the weights


def test_rows_of_old_weights_are_served_to_no_later_request(rig):
    rig.run(new("A", [1, 2], run=8), new("B", [3]))
    report = rig.cache.bump_weight_version()
    assert (report.adapter_id, report.version, report.rows_absent) == (None, 1, {HIDDEN_KEY: 12})
    assert is_absent(rig.run(new("C", [1, 2, 4], hit=8), new("D", [3, 5], hit=4)), "C", "D")
    assert rig.cache.bump_weight_version().version == 2
    assert rig.cache.stats().weight_version == 2


def test_every_key_and_every_adapter_is_meant(make_rig):
    rig = make_rig(
        keys={"codes": ((4,), torch.int64), "late": ((2,), torch.float32)},
        policy=ModelCachePolicy(
            token_keys={"codes"}, deferred_keys={"late"}, needs_full_hidden_states=False, request_keys=set()
        ),
        device_staging_bytes=1 << 12,
    )
    rig.run(new("A", [1]), new("V", [2], adapter=VOICE))
    report = rig.cache.bump_weight_version()
    assert report.rows_absent == {"codes": 8, "late": 8}
    taken = rig.run(new("C", [1, 3], hit=4), new("D", [2, 4], hit=4, adapter=VOICE), keys=["codes"])
    for req_id in "CD":
        assert taken[req_id].zero_ranges["codes"] == ((0, 4),)
        assert "late" not in taken[req_id].rows


def test_live_requests_go_on_and_what_they_write_from_now_on_is_found(rig):
    rig.run(new("A", [1, 2], run=6))
    rig.cache.bump_weight_version()
    assert_rows(rig.run(more("A", 2))["A"], ("A", 6, 8))
    assert_rows(rig.run(more("A", 4, blocks=[3]))["A"], ("A", 8, 12))
    taken = rig.run(new("C", [3, 4], hit=4), new("D", [1, 2, 5], hit=8))
    assert torch.equal(taken["C"][HIDDEN_KEY][:4], row_values("A", range(8, 12)))
    assert is_absent(taken, "D")


def test_rows_that_are_written_anew_in_the_same_blocks_are_found(rig):
    rig.run(new("A", [1]))
    rig.cache.bump_weight_version()
    rig.run(new("B", [1], content="B"), finish=["A"])
    assert_rows(rig.run(new("C", [1, 2], hit=4))["C"], ("B", 0, 4), ("C", 4, 8))


def test_open_steps_and_their_reads_deliver_what_they_planned(rig):
    rig.run(new("A", [1]))
    with rig.held():
        own = rig.step(new("B", [2]))
        hit = rig.step(new("C", [1, 3], hit=4))
        rig.cache.bump_weight_version()
    assert_rows(rig.take(hit, "C")["C"], ("A", 0, 4), ("C", 4, 8))
    assert_rows(rig.take(own, "B")["B"], ("B", 0, 4))


def test_a_planned_read_survives_the_overwriting_of_its_rows_by_new_weights(rig):
    rig.run(new("A", [1]))
    hit = rig.step(new("C", [1, 3], hit=4))
    rig.cache.bump_weight_version()
    rig.run(new("B", [1], content="B"), finish=["A", "C"])
    rig.cache.flush()
    assert_rows(rig.take(hit, "C")["C"], ("A", 0, 4), ("C", 4, 8))


def test_what_the_new_weights_compute_is_delivered_even_from_a_discarded_step(rig):
    rig.run(new("A", [1, 2]))
    rig.cache.bump_weight_version()
    rig.cache.discard_step(rig.step(more("A", 3)))
    assert_rows(rig.run(more("A", 1))["A"], ("A", 4, 8))


def test_rows_of_the_old_weights_that_are_still_owed_fail_their_request_and_no_other(rig):
    rig.cache.discard_step(rig.step(new("A", [1, 2]), new("B", [3])))
    rig.run(more("B", 1, blocks=[4]))
    rig.cache.bump_weight_version()
    taken = rig.run(more("A", 1), more("B", 1))
    assert is_absent(taken, "A")
    assert_rows(taken["B"], ("B", 5, 6))


def test_a_request_that_comes_back_and_is_computed_again_is_whole(rig):
    """The engine forgot its blocks: what was given is not given again, what was owed comes from the new weights."""
    rig.cache.discard_step(rig.step(new("A", [1, 2], run=3)))
    rig.run(new("B", [3]))
    rig.cache.bump_weight_version()
    assert_rows(rig.run(back("A", [4, 5], hit=0, run=6))["A"], ("A", 0, 6))


def test_a_copied_block_holds_rows_of_the_old_weights_too(rig):
    rig.run(new("A", [1, 2], run=8))
    rig.begin(copies=[(1, 5)])
    rig.cache.bump_weight_version()
    assert is_absent(rig.run(new("C", [5, 6], hit=4)), "C")
    assert is_absent(rig.run(new("D", [7, 8], hit=4), copies=[(2, 7)]), "D")


# -- a step that is under way


def test_a_step_under_way_is_saved_and_delivered_and_its_rows_count_as_old(rig):
    rig.run(new("Z", [9]))
    rig.begin(new("A", [1]), new("C", [1, 2], hit=4), new("D", [9, 3], hit=4))
    rig.cache.bump_weight_version()
    taken = rig.take(rig.save())
    assert_rows(taken["A"], ("A", 0, 4))
    assert_rows(taken["C"], ("A", 0, 4), ("C", 4, 8))
    assert_rows(taken["D"], ("Z", 0, 4), ("D", 4, 8))
    assert is_absent(rig.run(new("E", [1, 4], hit=4), new("F", [9, 5], hit=4)), "E", "F")


def test_after_a_step_that_is_never_saved_nothing_older_is_served(rig):
    rig.run(new("A", [1]))
    rig.begin(new("B", [2]))
    rig.cache.bump_weight_version()
    assert is_absent(rig.run(new("C", [1, 3], hit=4)), "C")
    assert_rows(rig.run(new("D", [4]))["D"], ("D", 0, 4))
    assert_rows(rig.run(new("E", [4, 5], hit=4))["E"], ("D", 0, 4), ("E", 4, 8))


def test_rows_that_go_with_a_step_under_way_are_told_once(rig):
    rig.run(new("A", [1]), new("V", [2], adapter=VOICE))
    rig.begin(new("B", [3]))
    assert rig.cache.bump_adapter_version(VOICE).rows_absent == {HIDDEN_KEY: 4}
    assert rig.cache.bump_adapter_version(VOICE).rows_absent == {HIDDEN_KEY: 0}
    rig.save()
    assert rig.cache.bump_weight_version().rows_absent == {HIDDEN_KEY: 8}
    assert rig.cache.bump_weight_version().rows_absent == {HIDDEN_KEY: 0}


# -- adapters


def test_a_new_version_of_an_adapter_touches_its_rows_only(rig):
    rig.run(new("A", [1]), new("V", [2], adapter=VOICE), new("W", [3], adapter=OTHER))
    report = rig.cache.bump_adapter_version(VOICE)
    assert (report.adapter_id, report.version, report.rows_absent) == (VOICE, 1, {HIDDEN_KEY: 4})
    taken = rig.run(
        new("C", [1, 4], hit=4), new("D", [2, 5], hit=4, adapter=VOICE), new("E", [3, 6], hit=4, adapter=OTHER)
    )
    assert is_absent(taken, "D")
    assert_rows(taken["C"], ("A", 0, 4), ("C", 4, 8))
    assert_rows(taken["E"], ("W", 0, 4), ("E", 4, 8))
    assert dict(rig.cache.stats().adapter_versions) == {VOICE: 1}
    assert rig.cache.stats().weight_version == 0


def test_blocks_that_an_adapter_gets_later_are_its_own_too(rig):
    rig.run(new("V", [1], adapter=VOICE))
    rig.run(more("V", 4, blocks=[2]))
    rig.run(back("V", [1, 2, 3], hit=8))
    rig.run(replaced("V", [1, 4], hit=4, content="V2"))
    assert rig.cache.bump_adapter_version(VOICE).rows_absent == {HIDDEN_KEY: 16}
    for number, block in enumerate((1, 2, 3, 4)):
        assert is_absent(rig.run(new(f"D{number}", [block, 5], hit=4, adapter=VOICE)), f"D{number}")


def test_a_block_that_changed_hands_is_its_new_owners(rig):
    rig.run(new("V", [1, 2], run=8, adapter=VOICE))
    rig.run(new("B", [1], content="B"), finish=["V"])
    assert rig.cache.bump_adapter_version(VOICE).rows_absent == {HIDDEN_KEY: 4}
    assert_rows(rig.run(new("C", [1, 3], hit=4))["C"], ("B", 0, 4), ("C", 4, 8))


def test_a_copied_block_is_the_adapters_whose_rows_it_holds(rig):
    rig.run(new("V", [1], adapter=VOICE))
    rig.begin(copies=[(1, 2)])
    assert rig.cache.bump_adapter_version(VOICE).rows_absent == {HIDDEN_KEY: 8}
    assert is_absent(rig.run(new("D", [2, 3], hit=4, adapter=VOICE)), "D")


def test_a_hit_on_another_adapters_block_finds_no_rows(rig):
    """Two adapters of one name share the engine's hashes."""
    rig.run(new("V", [1], adapter=VOICE), new("A", [2]))
    taken = rig.run(new("W", [1, 3], hit=4, adapter=OTHER), new("X", [2, 4], hit=4, adapter=VOICE))
    assert is_absent(taken, "W", "X")
    assert is_absent(rig.run(new("B", [1, 5], hit=4)), "B")
    assert_rows(rig.run(new("D", [1, 6], hit=4, adapter=VOICE))["D"], ("V", 0, 4), ("D", 4, 8))


def test_a_block_that_an_adapter_fills_on_is_no_longer_the_others(rig):
    rig.run(new("V", [1], run=2, adapter=VOICE))
    rig.run(new("W", [1, 2], hit=2, run=6, adapter=OTHER), finish=["V"])
    assert is_absent(rig.run(new("X", [1, 3], hit=4, adapter=VOICE)), "X")
    assert is_absent(rig.run(new("Y", [1, 4], hit=4, adapter=OTHER)), "Y")
    assert rig.cache.bump_adapter_version(OTHER).rows_absent == {HIDDEN_KEY: 10}


def test_a_request_keeps_the_adapter_it_started_with(rig):
    rig.run(new("V", [1, 2], adapter=VOICE))
    rig.run(back("V", [1, 3], hit=4))
    taken = rig.run(new("D", [3, 4], hit=4, adapter=VOICE))
    assert torch.equal(taken["D"][HIDDEN_KEY][:4], row_values("V", range(4, 8)))
    assert is_absent(rig.run(new("E", [3, 5], hit=4)), "E")


def test_a_replacement_that_names_another_adapter_changes_nothing_of_that(rig):
    """Also where no adapter was heard of before: its rows stay readable to the request itself."""
    rig.run(new("A", [1], run=4)).release()
    rig.cache.discard_step(rig.step(replaced("A", [2, 3], run=4, content="B", adapter=7)))
    rig.step(new("C", [4], adapter=7))
    rows = rig.run(new("A", [2, 3], hit=4, run=1, content="B"))["A"]
    assert_rows(rows, ("B", 0, 5))


def test_a_wrong_adapter_id_is_said_before_anything_changes(rig):
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="must be the id of an adapter"):
            rig.cache.bump_adapter_version(wrong)
    event = RequestEvent(RequestEventKind.STARTED, "A", (1,), adapter_id=-3)
    rig.begin_as([event], new("A", [1]))
    error = rig.take(rig.save()).failed["A"]
    assert isinstance(error, RequestEventError)
    assert "adapter_id=-3" in str(error)


# -- the rest


def test_reset_leaves_the_versions_and_clears_what_they_did(rig):
    rig.run(new("V", [1], adapter=VOICE))
    rig.cache.bump_weight_version()
    rig.cache.bump_adapter_version(VOICE)
    rig.begin(new("B", [2]))
    rig.cache.bump_weight_version()
    rig.cache.reset()
    assert_rows(rig.run(new("C", [1]))["C"], ("C", 0, 4))
    assert_rows(rig.run(new("D", [1, 3], hit=4))["D"], ("C", 0, 4), ("D", 4, 8))
    assert (rig.cache.stats().weight_version, dict(rig.cache.stats().adapter_versions)) == (2, {VOICE: 1})


def test_a_new_version_is_logged_once(rig, caplog):
    rig.run(new("A", [1]))
    with caplog.at_level(logging.INFO, logger="omni_core"):
        rig.cache.bump_weight_version()
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["new version of the weights"]


def test_a_closed_cache_refuses(rig):
    rig.cache.close()
    with pytest.raises(CacheClosedError):
        rig.cache.bump_weight_version()
