# SPDX-License-Identifier: Apache-2.0
"""Faults 1c: row counts, slots, block sizes, shapes, and where a cache must not be built."""

import numpy as np
import pytest
import torch
from cache_rig import more, new
from row_values import assert_rows, row_values

from omni_core.prefix_cache.config import HIDDEN_KEY
from omni_core.prefix_cache.errors import (
    BlockSizeMismatchError,
    LayoutMismatchError,
    StepTooLargeError,
    UnknownKeyError,
)
from omni_core.prefix_cache.events import StepLayout
from omni_core.prefix_cache.gate import GateStatus, StageFacts, full_attention_group, stage_prefix_cache_config
from omni_core.prefix_cache.policy import ModelCachePolicy
from omni_core.sinks.base import RequestEnd, SinkDelivery, SinkRequestEnd
from omni_core.sinks.memory import MemorySink


def test_fault_037_a_hit_that_ends_inside_a_block_keeps_its_tail(rig):
    rig.run(new("A", [1, 2, 3], run=10))
    taken = rig.run(new("C", [1, 2, 3], hit=10, run=2))
    assert_rows(taken["C"], ("A", 0, 10), ("C", 10, 12))


def test_fault_037_two_hundred_tokens_at_block_size_16(make_rig):
    rig = make_rig(num_blocks=32, block_size=16, max_num_tokens=256)
    blocks = list(range(1, 14))
    rig.run(new("A", blocks, run=200))
    taken = rig.run(new("C", blocks, hit=200, run=3))
    assert_rows(taken["C"], ("A", 0, 200), ("C", 200, 203))


def test_fault_039_padded_and_real_lengths_in_one_step(make_rig):
    rig = make_rig(keys={"X": ((2,), torch.float32), "Y": ((5,), torch.float32)})
    rig.begin(new("A", [1], run=3))
    whole = torch.arange(5.0)
    step = rig.save({"X": rig.rows("X", pad=1), "Y": rig.rows("Y"), "Z": whole}, keys=(), pad=1)
    rows = rig.take(step)["A"]
    assert_rows(rows, ("A", 0, 3))
    assert_rows(rows, ("A", 0, 3), key="X", trailing=(2,))
    assert_rows(rows, ("A", 0, 3), key="Y", trailing=(5,))
    assert torch.equal(rows.leftovers["Z"], whole)
    assert set(rig.cache.stats().key_row_bytes) == {HIDDEN_KEY, "X", "Y"}


def test_fault_040_the_stale_tail_of_a_reused_slot_buffer_is_not_honoured(rig):
    slots, positions = np.empty(8, np.int64), np.empty(8, np.int64)

    def reused(layout):
        count = len(layout.slots)
        slots[:count], positions[:count] = layout.slots, layout.positions
        return StepLayout(layout.req_ids, layout.starts, positions[:count], slots[:count])

    rig.begin(new("A", [1, 2], run=8))
    rig.take(rig.save(layout=reused(rig.layout())))
    rig.begin(new("B", [3], run=3))
    rig.take(rig.save(layout=reused(rig.layout())))
    assert_rows(rig.run(new("C", [1, 2, 4], hit=8))["C"], ("A", 0, 8), ("C", 8, 12))
    assert_rows(rig.run(new("D", [3, 5], hit=3, run=1))["D"], ("B", 0, 3), ("D", 3, 4))


def test_fault_040_a_slot_buffer_longer_than_the_step_is_refused(rig):
    rig.begin(new("A", [1], run=3))
    layout = rig.layout()
    too_long = StepLayout(layout.req_ids, layout.starts, layout.positions, np.arange(8, dtype=np.int64))
    with pytest.raises(LayoutMismatchError, match="8 slots"):
        rig.save(layout=too_long)


ALLOCATOR_BLOCK, KERNEL_BLOCK, RATIO = 128, 16, 8


def finer(blocks):
    """The kernel's table of the same memory: each of the allocator's blocks is `RATIO` of the kernel's."""
    return [block * RATIO + part for block in blocks for part in range(RATIO)]


@pytest.mark.parametrize("cache_block", [ALLOCATOR_BLOCK, KERNEL_BLOCK])
@pytest.mark.parametrize("slots_by", [ALLOCATOR_BLOCK, KERNEL_BLOCK])
def test_fault_041_both_block_tables_of_one_memory_give_the_same_slots_and_rows(make_rig, cache_block, slots_by):
    blocks = [3, 1]
    tables = {ALLOCATOR_BLOCK: blocks, KERNEL_BLOCK: finer(blocks)}
    tables_of_c = {ALLOCATOR_BLOCK: [3, 2], KERNEL_BLOCK: finer([3, 2])}
    rig = make_rig(num_blocks=4 * ALLOCATOR_BLOCK // cache_block, block_size=cache_block, max_num_tokens=256)

    def layout(req_id, table, first, last):
        positions = np.arange(first, last)
        slots = np.array([table[p // slots_by] * slots_by + p % slots_by for p in positions.tolist()])
        return StepLayout((req_id,), np.array([0, last - first]), positions, slots)

    position = 130
    by_allocator = tables[ALLOCATOR_BLOCK][position // 128] * 128 + position % 128
    by_kernel = tables[KERNEL_BLOCK][position // 16] * 16 + position % 16
    assert by_allocator == by_kernel == 130

    rig.begin(new("A", tables[cache_block], run=200))
    rig.take(rig.save(layout=layout("A", tables[slots_by], 0, 200)))
    rig.begin(new("C", tables_of_c[cache_block], hit=128, run=3))
    taken = rig.take(rig.save(layout=layout("C", tables_of_c[slots_by], 128, 131)))
    assert_rows(taken["C"], ("A", 0, 128), ("C", 128, 131))


def test_fault_041_a_stage_whose_two_block_sizes_do_not_fit_gets_no_cache():
    decision = stage_prefix_cache_config(
        StageFacts(enabled=True, allocator_block_size=ALLOCATOR_BLOCK, block_table_block_size=KERNEL_BLOCK + 8)
    )
    assert decision.status is GateStatus.REFUSED
    assert "128" in decision.reason
    assert "24" in decision.reason


def test_fault_043_slots_of_a_group_with_another_block_size_are_refused(make_rig):
    rig = make_rig(num_blocks=80, block_size=28, max_num_tokens=128)
    rig.begin(new("A", [1, 2, 3, 4], run=100))
    positions = np.arange(100)
    other_group = StepLayout(("A",), np.array([0, 100]), positions, 1 * 1024 + positions)
    before = rig.stats()
    with pytest.raises(BlockSizeMismatchError, match="block_size=28"):
        rig.save(layout=other_group)
    assert rig.stats() == before
    assert_rows(rig.take(rig.save())["A"], ("A", 0, 100))


def test_fault_043_a_hybrid_stage_is_mirrored_on_its_full_attention_group():
    assert full_attention_group(("sliding_window", "mamba", "full_attention")) == 2
    decision = stage_prefix_cache_config(StageFacts(enabled=True, attention_group_kinds=("mamba", "sliding_window")))
    assert decision.status is GateStatus.REFUSED
    assert "sliding_window" in decision.reason


def test_fault_045_each_requests_rows_go_to_its_own_slots(rig):
    rig.run(new("A", [1], run=4), new("B", [2], run=4))
    taken = rig.run(new("C", [3]), new("D", [2, 4], hit=4))
    assert_rows(taken["C"], ("C", 0, 4))
    assert_rows(taken["D"], ("B", 0, 4), ("D", 4, 8))
    assert_rows(rig.run(new("E", [3, 5], hit=4))["E"], ("C", 0, 4), ("E", 4, 8))
    assert_rows(rig.run(new("F", [1, 6], hit=4))["F"], ("A", 0, 4), ("F", 4, 8))


def test_fault_046_a_key_asked_under_another_name_is_an_error_that_names_the_keys(make_rig):
    rig = make_rig(keys={"0": ((4,), torch.float32)})
    rows = rig.run(new("A", [1]))["A"]
    assert_rows(rows, ("A", 0, 4), key="0", trailing=(4,))
    with pytest.raises(UnknownKeyError, match=r"'hidden\.layer_0'.*'0', '__hidden_states__'"):
        rows["hidden.layer_0"]


def test_fault_048_each_request_gets_its_own_rows_not_the_batch(rig):
    taken = rig.run(new("A", [1], run=3), new("B", [2, 3], run=5))
    assert_rows(taken["A"], ("A", 0, 3))
    assert_rows(taken["B"], ("B", 0, 5))


def test_fault_049_a_key_too_big_for_the_settings_is_refused_not_skipped(make_rig):
    rig = make_rig(max_num_tokens=16, extra_row_bytes=0, extra_step_bytes=0)
    rig.run(new("A", [1, 2], run=8))
    rig.begin(new("C", [1, 2, 3], hit=8, run=4))
    big = {"big": row_values("C", range(8, 12), "big", (1000,))}
    before = rig.stats()
    with pytest.raises(StepTooLargeError, match="extra_row_bytes=0"):
        rig.save(big)
    assert rig.stats() == before
    assert_rows(rig.take(rig.save())["C"], ("A", 0, 8), ("C", 8, 12))


def test_fault_051_a_stage_that_reads_the_tail_only_gets_no_rebuilt_prefix(make_rig):
    rig = make_rig(policy=ModelCachePolicy(needs_full_hidden_states=False))
    rig.run(new("A", [1, 2], run=8))
    taken = rig.run(new("C", [1, 2, 3], hit=8))
    assert_rows(taken["C"], ("C", 8, 12))
    assert rig.cache.stats().key_row_bytes == {}
    assert rig.cache.stats().pool_reserved_bytes == 0


def test_fault_052_rows_are_found_by_scheduled_counts_not_by_total_length(rig):
    rig.run(new("A", [1, 2], run=8), new("B", [3, 4], run=8))
    step = rig.step(new("C", [1, 2, 5], hit=8), new("D", [3, 4, 6], hit=8))
    assert rig.num_tokens == 8
    taken = rig.take(step)
    assert_rows(taken["C"], ("A", 0, 8), ("C", 8, 12))
    assert_rows(taken["D"], ("B", 0, 8), ("D", 8, 12))


def test_fault_053_a_prompt_computed_in_chunks_is_one_record(rig):
    sink = MemorySink()
    runs = [new("A", [1, 2, 3], run=4), more("A", 4), more("A", 4)]
    for number, run in enumerate(runs):
        rows = rig.run(run)["A"]
        assert_rows(rows, ("A", 4 * number, 4 * number + 4))
        sink.accept(SinkDelivery("A", None, number, rows.ranges, rows.rows, np.arange(4, dtype=np.int64)))
    sink.finish(SinkRequestEnd("A", None, RequestEnd.FINISHED))
    stored = sink.request("A")
    assert stored.ranges == ((0, 12),)
    assert torch.equal(stored.rows[HIDDEN_KEY], row_values("A", range(12)))


def test_fault_054_rows_cover_the_whole_prompt_behind_a_hit(rig):
    rig.run(new("A", [1, 2], run=8))
    rows = rig.run(new("C", [1, 2, 3], hit=8, run=4))["C"]
    assert rows.num_rows == 12
    assert_rows(rows, ("A", 0, 8), ("C", 8, 12))


def test_fault_057_the_pool_is_sized_from_its_own_row_bytes(make_rig):
    rig = make_rig(hidden=4096, dtype=torch.float32, max_num_tokens=8)
    assert rig.config.pool_bytes(rig.config.hidden_row_bytes) == 64 * 4096 * 4
    taken = rig.run(new("A", [1]), new("C", [1, 2], hit=4))
    assert_rows(taken["C"], ("A", 0, 4), ("C", 4, 8), trailing=(4096,))
    assert rig.cache.stats().pool_reserved_bytes == 64 * 4096 * 4


@pytest.mark.parametrize(("block_size", "hit"), [(16, 96), (256, 100)])
def test_fault_059_a_request_that_fills_no_block_is_handled(make_rig, block_size, hit):
    rig = make_rig(num_blocks=512 // block_size * 2, block_size=block_size, max_num_tokens=128)
    count = -(-101 // block_size)
    rig.run(new("A", list(range(count)), run=100))
    shared = hit // block_size
    table = list(range(shared)) + list(range(count, 2 * count))
    if hit % block_size:
        # The engine copies the block that the hit ends in, and writes on in the copy.
        taken = rig.run(new("C", table, hit=hit, run=1), copies=[(0, count)])
    else:
        taken = rig.run(new("C", table, hit=hit, run=5))
    assert_rows(taken["C"], ("A", 0, hit), ("C", hit, 101))


def test_fault_061_rows_of_a_strided_source_are_read_by_its_stride(make_rig):
    rig = make_rig(keys={"codes": ((2, 3), torch.float32)})
    rig.begin(new("A", [1, 2], run=6))
    wide = torch.full((6, 7), -1.0)
    wide[:, 2:5] = rig.rows()
    turned = rig.rows("codes").permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert not turned.is_contiguous()
    step = rig.save({"codes": turned}, hidden=wide[:, 2:5], keys=())
    rows = rig.take(step)["A"]
    assert_rows(rows, ("A", 0, 6))
    assert_rows(rows, ("A", 0, 6), key="codes", trailing=(2, 3))
    rows = rig.run(new("C", [1, 3], hit=4))["C"]
    assert_rows(rows, ("A", 0, 4), ("C", 4, 8))
    assert_rows(rows, ("A", 0, 4), ("C", 4, 8), key="codes", trailing=(2, 3))


@pytest.mark.parametrize("sizes", [{"decode_context_parallel_size": 2}, {"prefill_context_parallel_size": 2}])
def test_fault_062_context_parallelism_is_refused_with_its_reason(sizes):
    decision = stage_prefix_cache_config(StageFacts(enabled=True, **sizes))
    assert decision.status is GateStatus.REFUSED
    assert "stripes tokens over ranks" in decision.reason


def test_fault_063_a_rank_without_outputs_is_ignored_by_the_gate():
    decision = stage_prefix_cache_config(StageFacts(enabled=True, is_output_rank=False))
    assert decision.status is GateStatus.IGNORED


def test_fault_063_steps_that_are_announced_and_never_saved_are_inert(rig):
    rig.begin(new("A", [1], run=4))
    for _ in range(10):
        rig.begin(new("C", [1, 2], hit=4))
        rig.begin(more("C", blocks=[3]))
        rig.begin(finish=["C"])
    rig.begin()
    rig.assert_nothing_held()
    assert rig.cache.stats().requests_failed == 0


def test_fault_065_speculation_with_async_scheduling_is_refused():
    decision = stage_prefix_cache_config(StageFacts(enabled=True, num_speculative_tokens=3, async_scheduling=True))
    assert decision.status is GateStatus.REFUSED
    assert "num_speculative_tokens=3" in decision.reason
