# SPDX-License-Identifier: Apache-2.0
"""A step's read gives the rows of its own step, however late it runs and whatever is written meanwhile."""

import dataclasses

import pytest
import torch
from cache_rig import BRIEF_S, more, new
from row_values import assert_rows, row_values

from omni_core.prefix_cache.errors import ReadFailedError

CODES = {"codes": ((4,), torch.bfloat16)}


def onto_block(rig, block):
    """The layout of the step under way, its first request's rows put into `block` instead."""
    layout = rig.layout()
    slots = layout.slots.copy()
    count = rig.batch[0].last - rig.batch[0].first
    slots[:count] = [block * rig.config.block_size + offset for offset in range(count)]
    return dataclasses.replace(layout, slots=slots)


def test_rows_that_the_step_itself_writes_replace_those_gathered_before(rig):
    rig.run(new("A", [1, 2], run=8))
    rig.begin(new("B", [3]), new("C", [1, 2, 4], hit=8))
    rig.runtime.wait_passed("prefetch.gathered", 1)
    taken = rig.take(rig.save(layout=onto_block(rig, 1)))
    assert_rows(taken["C"], ("B", 0, 4), ("A", 4, 8), ("C", 8, 12))


def test_rows_of_a_later_step_are_never_seen(rig):
    rig.run(new("A", [1]))
    with rig.runtime.stop_at("prefetch.landed") as before_gather:
        hit = rig.step(new("C", [1, 2], hit=4))
        before_gather.wait_reached()
        # Two later steps write the same slots, in the same tenancy and in a new one.
        rig.begin(new("B", [3]))
        rig.take(rig.save(layout=onto_block(rig, 1)))
        rig.run(new("E", [1]), finish=["A", "C"])
        rig.cache.flush()
    assert_rows(rig.take(hit, "C")["C"], ("A", 0, 4), ("C", 4, 8))
    assert rig.cache.stats().rows_rescued == 4
    rig.assert_nothing_held()


def test_rows_overwritten_between_gather_and_delivery_are_those_gathered(rig):
    rig.run(new("A", [1]))
    with rig.runtime.stop_at("prefetch.gathered") as gathered:
        hit = rig.step(new("C", [1, 2], hit=4))
        gathered.wait_reached()
        rig.run(new("E", [1]), finish=["A", "C"])
        rig.cache.flush()
    assert_rows(rig.take(hit, "C")["C"], ("A", 0, 4), ("C", 4, 8))
    rig.assert_nothing_held()


def test_a_rescue_in_progress_holds_its_reader_back_and_then_serves_it(rig):
    rig.run(new("A", [1]))
    with rig.runtime.stop_at("prefetch.landed") as before_gather:
        hit = rig.step(new("C", [1, 2], hit=4))
        before_gather.wait_reached()
        rig.cache.flush()
        with rig.runtime.stop_at("committer.set_aside") as rescuing:
            later = rig.step(new("E", [1]), finish=["A", "C"])
            rescuing.wait_reached()
            before_gather.open()
            rig.runtime.wait_until_waiting("omni-core-prefetch", on="progress")
            taker = rig.taking(hit, "C")
    assert_rows(taker.result()["C"], ("A", 0, 4), ("C", 4, 8))
    rig.cache.discard_step(later)
    assert rig.cache.stats().rows_rescued == 4


@pytest.mark.parametrize("how", ["discard", "take"])
def test_a_read_that_ends_while_its_rows_are_set_aside_leaves_nothing_behind(make_rig, how):
    rig = make_rig(join_timeout_s=BRIEF_S)
    rig.run(new("A", [1]))
    with rig.runtime.stop_at("prefetch.landed") as before_gather:
        hit = rig.step(new("C", [1, 2], hit=4))
        before_gather.wait_reached()
        recycled = rig.stats().recycled_bytes
        with rig.runtime.stop_at("committer.set_aside") as rescuing:
            later = rig.step(new("E", [1]), finish=["A", "C"])
            rescuing.wait_reached()
            if how == "discard":
                rig.cache.discard_step(hit)
            else:
                taken = rig.take(hit, "C")
                assert isinstance(taken.failed["C"], ReadFailedError)
        assert rig.stats().recycled_bytes > recycled, "the buffer of the rescue came back"
    assert_rows(rig.take(later, "E")["E"], ("E", 0, 4))
    assert_rows(rig.run(new("F", [1, 3], hit=4))["F"], ("E", 0, 4), ("F", 4, 8))
    rig.assert_nothing_held()


def test_one_row_overwritten_again_and_again_is_set_aside_once(make_rig):
    rig = make_rig(staging_depth=8)
    rig.run(new("A", [1]))
    with rig.runtime.stop_at("prefetch.landed") as before_gather:
        hit = rig.step(new("C", [1, 2], hit=4))
        before_gather.wait_reached()
        previous = ["A", "C"]
        for number in range(5):
            rig.run(new(f"r{number}", [1]), finish=previous)
            previous = [f"r{number}"]
        rig.cache.flush()
    assert_rows(rig.take(hit, "C")["C"], ("A", 0, 4), ("C", 4, 8))
    assert rig.cache.stats().rows_rescued == 4
    assert_rows(rig.run(new("D", [1, 3], hit=4))["D"], ("r4", 0, 4), ("D", 4, 8))


def test_two_readers_of_different_tenants_of_one_block_each_get_their_own(rig):
    rig.run(new("A", [1]))
    with rig.runtime.stop_at("prefetch.landed") as before_gather:
        first = rig.step(new("C", [1, 2], hit=4))
        before_gather.wait_reached()
        rig.run(new("E", [1]), finish=["A", "C"])
        second = rig.step(new("F", [1, 3], hit=4))
        rig.run(new("G", [1]), finish=["E", "F"])
        rig.cache.flush()
    assert_rows(rig.take(second, "F")["F"], ("E", 0, 4), ("F", 4, 8))
    assert_rows(rig.take(first, "C")["C"], ("A", 0, 4), ("C", 4, 8))
    assert_rows(rig.run(new("D", [1, 4], hit=4), finish=["G"])["D"], ("G", 0, 4), ("D", 4, 8))
    rig.assert_nothing_held()


def test_readers_of_writes_that_have_not_landed_get_each_its_write(make_rig):
    """Pins on ids still to land: every write of the block is read by someone, none may be lost."""
    rig = make_rig(staging_depth=12)
    hits = []
    with rig.held():
        for number in range(4):
            writer, reader = f"r{2 * number}", f"r{2 * number + 1}"
            ended = [f"r{2 * number - 2}", f"r{2 * number - 1}"] if number else []
            rig.step(new(writer, [1]), finish=ended)
            hits.append((rig.step(new(reader, [1, 2 + number], hit=4)), writer, reader))
        takers = [rig.taking(step, reader, thread=f"taker-{reader}") for step, _, reader in hits]
    for taker, (_, writer, reader) in zip(takers, hits, strict=True):
        assert_rows(taker.result()[reader], (writer, 0, 4), (reader, 4, 8))
    for step, _, _ in hits:
        rig.cache.discard_step(step - 1)
    rig.assert_nothing_held()


def test_only_the_keys_and_rows_that_are_overwritten_are_set_aside(make_rig):
    rig = make_rig(keys=CODES)
    rig.run(new("A", [1, 2], run=8))
    with rig.runtime.stop_at("prefetch.landed") as before_gather:
        hit = rig.step(new("C", [1, 2, 3], hit=8, run=2))
        before_gather.wait_reached()
        rig.begin(new("E", [4], run=3))
        # Rows 0-2 of block 2 are written again, without the second key.
        rig.take(rig.save(layout=onto_block(rig, 2), keys=()))
        rig.cache.flush()
    rows = rig.take(hit, "C")["C"]
    assert_rows(rows, ("A", 0, 8), ("C", 8, 10))
    assert_rows(rows, ("A", 0, 8), ("C", 8, 10), key="codes", trailing=(4,), dtype=torch.bfloat16)
    assert rig.cache.stats().rows_rescued == 3
    rows = rig.run(new("D", [1, 2, 5], hit=8, run=2))["D"]
    expected = [("A", 0, 4), ("E", 0, 3), ("A", 7, 8), ("D", 8, 10)]
    assert torch.equal(rows.hidden_states, torch.cat([row_values(who, range(a, b)) for who, a, b in expected]))
    assert_rows(rows, ("A", 0, 8), ("D", 8, 10), key="codes", trailing=(4,), dtype=torch.bfloat16)


def test_a_block_copy_onto_a_block_that_is_being_read_sets_its_rows_aside(rig):
    rig.run(new("A", [1]), new("B", [2]))
    with rig.runtime.stop_at("prefetch.landed") as before_gather:
        hit = rig.step(new("C", [1, 3], hit=4))
        before_gather.wait_reached()
        rig.begin(new("D", [1, 4], hit=4), copies=[(2, 1)], finish=["A", "C"])
        copied = rig.save()
        rig.cache.flush()
    assert_rows(rig.take(hit, "C")["C"], ("A", 0, 4), ("C", 4, 8))
    assert_rows(rig.take(copied, "D")["D"], ("B", 0, 4), ("D", 4, 8))


def test_the_end_of_a_request_ends_no_read(rig):
    rig.run(new("A", [1]))
    with rig.runtime.stop_at("prefetch.landed") as before_gather:
        finished = rig.step(new("C", [1, 2], hit=4))
        before_gather.wait_reached()
        aborted = rig.step(new("D", [1, 3], hit=4))
        rig.begin(finish=["A", "C"], abort=["D"])
        assert rig.cache.stats().live_reads == 2
        assert rig.cache.stats().pinned_slots == 4
    assert_rows(rig.take(finished, "C")["C"], ("A", 0, 4), ("C", 4, 8))
    assert_rows(rig.take(aborted, "D")["D"], ("A", 0, 4), ("D", 4, 8))
    rig.assert_nothing_held()


def test_pins_are_returned_once_whatever_ends_the_step(rig):
    rig.run(new("A", [1, 2], run=8))
    taken = rig.step(new("C", [1, 3], hit=4), new("D", [1, 2, 4], hit=8))
    discarded = rig.step(new("E", [1, 2, 5], hit=8))
    rig.begin(new("F", [1, 6], hit=4))
    assert rig.cache.stats().pinned_slots == 8
    assert rig.cache.stats().live_reads == 3
    rig.take(taken, "C", "D")
    rig.cache.discard_step(discarded)
    assert rig.cache.stats().pinned_slots == 4
    rig.begin()
    rig.assert_nothing_held()


def test_late_steps_may_be_taken_in_any_order(make_rig):
    rig = make_rig(staging_depth=8, keys=CODES)
    rig.run(new("A", [1], run=4))
    steps = [rig.step(new("C", [1, 2, 3], hit=4, run=2)), rig.step(more("C", 2))]
    steps += [rig.step(more("C", 1)), rig.step(more("C", 2))]
    expected = [(("A", 0, 4), ("C", 4, 6)), (("C", 6, 8),), (("C", 8, 9),), (("C", 9, 11),)]
    for at in (2, 0, 3, 1):
        rows = rig.take(steps[at], "C")["C"]
        assert_rows(rows, *expected[at])
        assert_rows(rows, *expected[at], key="codes", trailing=(4,), dtype=torch.bfloat16)


def test_steps_are_taken_by_several_threads_at_once(make_rig):
    rig = make_rig(staging_depth=16, num_blocks=64)
    rig.run(new("A", [1], run=4))
    with rig.held():
        steps = {f"r{number}": rig.step(new(f"r{number}", [1, 2 + number], hit=4)) for number in range(12)}
        takers = {req_id: rig.taking(step, req_id, thread=f"taker-{req_id}") for req_id, step in steps.items()}
    for req_id, taker in takers.items():
        assert_rows(taker.result()[req_id], ("A", 0, 4), (req_id, 4, 8))
    rig.assert_nothing_held()
