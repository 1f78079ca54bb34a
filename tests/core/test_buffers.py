# SPDX-License-Identifier: Apache-2.0
"""Delivered rows are the caller's until `release`; what was released is used again, what was not is never touched."""

import pytest
import torch
from cache_rig import more, new
from row_values import assert_rows, row_values

BIG = 4096


def test_rows_that_are_not_released_stay_valid_for_good(make_rig):
    rig = make_rig(staging_depth=1)
    kept = []
    rig.run(new("A", [1, 2], run=8)).release()
    for number in range(6):
        req_id = f"r{number}"
        kept.append((req_id, rig.run(new(req_id, [1, 2, 3], hit=8), finish=[f"r{number - 1}"] if number else [])))
        rig.run(more(req_id, 1, blocks=[4])).release()
    rig.cache.reset()
    for req_id, taken in kept:
        assert_rows(taken[req_id], ("A", 0, 8), (req_id, 8, 12))


@pytest.mark.parametrize("asked", [("A", "B", "C"), ("A", "B"), ("B",)])
def test_rows_without_a_hit_outlive_their_staging_page_too(make_rig, asked):
    rig = make_rig(staging_depth=1, keys={"codes": ((4,), torch.int64)})
    taken = rig.take(rig.step(new("A", [1], run=3), new("B", [2], run=2), new("C", [3], run=2)), *asked)
    for number in range(4):
        rig.run(*(new(f"r{number * 3 + part}", [4 + part], run=4) for part in range(3)))
    for req_id in asked:
        count = 3 if req_id == "A" else 2
        assert_rows(taken[req_id], (req_id, 0, count))
        assert_rows(taken[req_id], (req_id, 0, count), key="codes", trailing=(4,), dtype=torch.int64)


def test_delivered_rows_belong_to_the_caller_who_may_change_them(rig):
    rig.run(new("A", [1]))
    taken = rig.run(new("C", [1, 2], hit=4), new("D", [1, 3], hit=4), new("B", [5]))
    for req_id in ("C", "B"):
        taken[req_id].hidden_states.fill_(-1)
    assert_rows(taken["D"], ("A", 0, 4), ("D", 4, 8))
    again = rig.run(new("E", [1, 4], hit=4), new("F", [5, 6], hit=4))
    assert_rows(again["E"], ("A", 0, 4), ("E", 4, 8))
    assert_rows(again["F"], ("B", 0, 4), ("F", 4, 8))


def test_released_buffers_are_used_again_and_unreleased_ones_are_not(make_rig):
    rig = make_rig(hidden=BIG, num_blocks=8)
    rig.run(new("A", [1])).release()
    first = rig.run(new("C", [1, 2], hit=4))
    address = first["C"].hidden_states.untyped_storage().data_ptr()
    first.release()
    assert rig.cache.stats().recycled_bytes > 0
    second = rig.run(new("D", [1, 3], hit=4), finish=["C"])
    assert second["D"].hidden_states.untyped_storage().data_ptr() == address
    third = rig.run(new("E", [1, 4], hit=4), finish=["D"])
    assert third["E"].hidden_states.untyped_storage().data_ptr() != address
    assert_rows(second["D"], ("A", 0, 4), ("D", 4, 8), trailing=(BIG,))
    assert_rows(third["E"], ("A", 0, 4), ("E", 4, 8), trailing=(BIG,))


def test_a_second_release_does_nothing(make_rig):
    rig = make_rig(hidden=BIG, num_blocks=8)
    rig.run(new("A", [1])).release()
    taken = rig.run(new("C", [1, 2], hit=4))
    taken.release()
    recycled = rig.cache.stats().recycled_bytes
    taken.release()
    assert rig.cache.stats().recycled_bytes == recycled
    first = rig.run(new("D", [1, 3], hit=4))
    second = rig.run(new("E", [1, 4], hit=4))
    assert_rows(first["D"], ("A", 0, 4), ("D", 4, 8), trailing=(BIG,))
    assert_rows(second["E"], ("A", 0, 4), ("E", 4, 8), trailing=(BIG,))


def test_release_works_on_another_thread_and_after_the_cache_closed(make_rig):
    rig = make_rig()
    taken = [rig.run(new("A", [1])), rig.run(more("A", 1, blocks=[2]))]
    rig.call("builder", taken[0].release).result()
    assert rig.cache.close() is True
    assert_rows(taken[1]["A"], ("A", 4, 5))
    taken[1].release()


def test_no_more_than_the_limit_is_kept_for_reuse(make_rig):
    for limit in (0, 1 << 20):
        rig = make_rig(hidden=BIG, max_recycled_bytes=limit, staging_depth=8, num_blocks=8)
        held = [rig.run(new(f"r{number}", [1])) for number in range(30)]
        for taken in held:
            taken.release()
        assert rig.cache.stats().recycled_bytes <= limit
        assert_rows(rig.run(new("A", [2]))["A"], ("A", 0, 4), trailing=(BIG,))


def test_buffers_of_reads_nobody_took_are_used_again(make_rig):
    rig = make_rig(hidden=BIG, num_blocks=8)
    rig.run(new("A", [1])).release()
    rig.begin(new("C", [1, 2], hit=4))
    rig.runtime.wait_passed("prefetch.gathered", 1)
    rig.begin(abort=["C"])
    rig.cache.discard_step(rig.step(new("D", [1, 3], hit=4)))
    rig.cache.flush()
    recycled = rig.cache.stats().recycled_bytes
    assert recycled > 0
    for number in range(20):
        rig.cache.discard_step(rig.step(new(f"r{number}", [1, 4], hit=4)))
        rig.begin(abort=[f"r{number}"])
        rig.cache.flush()
    assert rig.cache.stats().recycled_bytes <= 4 * recycled


def test_rows_of_a_whole_batch_are_separate_per_request(rig):
    runs = [new(f"r{number}", [number], run=1 + number % 4) for number in range(12)]
    step = rig.step(*runs)
    wanted = [f"r{number}" for number in (11, 3, 4)]
    taken = rig.take(step, *wanted)
    assert sorted(taken) == sorted(wanted)
    for req_id in wanted:
        number = int(req_id[1:])
        assert torch.equal(taken[req_id].hidden_states, row_values(req_id, range(1 + number % 4)))
