# SPDX-License-Identifier: Apache-2.0
"""Rows of a deferred key wait on the device, cross once, whole and oldest first, and are joined like any other."""

import pytest
import torch
from cache_rig import SHORT_S, back, more, new
from controlled_runtime import ControlledRuntime
from deferred_rig import CHUNK_BYTES, MEL, MEL_SPEC, assert_both, assert_mel, deferred_rigs
from omni_core_cpu_sim import CpuSimBackend
from row_values import assert_rows

from omni_core.prefix_cache.errors import JoinTimeoutError, StepOrderError
from omni_core.prefix_cache.policy import ModelCachePolicy


@pytest.fixture
def make_rig():
    with deferred_rigs() as make:
        yield make


@pytest.fixture
def rig(make_rig):
    return make_rig()


class FloatsOnTheDevice(CpuSimBackend):
    """Integers lie on the host, as they do beside a real device."""

    def owns(self, tensor):
        return tensor.dtype.is_floating_point


# -- waiting on the device, and leaving it


def test_rows_wait_on_the_device_until_their_request_finishes(rig):
    for step in (rig.step(new("A", [1, 2], run=4)), rig.step(more("A", 4))):
        rig.discard(step)
    rig.settle()
    assert rig.on_device() == (2, 2 * CHUNK_BYTES, 1)
    assert rig.copies() == 0
    rig.begin(finish=["A"])
    rig.settle()
    assert rig.on_device() == (0, 0, 0)
    assert rig.copies() == 2
    assert_both(rig.run(new("C", [1, 2, 3], hit=8))["C"], ("A", 0, 8), ("C", 8, 12))
    rig.assert_nothing_held()


def test_rows_of_an_aborted_request_stay_hittable(rig):
    rig.discard(rig.step(new("A", [1, 2], run=8)))
    rig.begin(new("C", [1, 2, 3], hit=8), abort=["A"])
    assert_both(rig.take(rig.save())["C"], ("A", 0, 8), ("C", 8, 12))


def test_an_end_forces_every_record_up_to_the_requests_last_and_no_later_one(rig):
    rig.discard(rig.step(new("A", [1]), new("B", [2])))
    rig.discard(rig.step(more("B", 4, blocks=[3])))
    rig.begin(finish=["A"])
    rig.settle()
    assert rig.on_device() == (1, CHUNK_BYTES, 1)
    assert rig.copies() == 1


def test_an_end_of_a_request_without_records_forces_nothing(rig):
    rig.discard(rig.step(new("A", [1])))
    rig.begin(finish=["never-seen"], abort=["neither"])
    rig.settle()
    assert rig.on_device() == (1, CHUNK_BYTES, 1)


def test_an_id_used_again_has_writes_of_its_own(rig):
    rig.discard(rig.step(new("A", [1])))
    rig.step(new("A", [2, 3]), finish=["A"])
    rig.settle()
    assert rig.on_device() == (1, CHUNK_BYTES, 1)
    rig.step(more("A", 4))
    with rig.held():
        rig.begin(finish=["A"])
        with pytest.raises(JoinTimeoutError, match=r"deferred write 1 of request 'A' \(2 records\)"):
            rig.cache.flush(SHORT_S)


def test_flush_brings_every_row_home(rig):
    for number in range(3):
        rig.discard(rig.step(new(f"r{number}", [number + 1])))
    rig.cache.flush()
    assert rig.on_device() == (0, 0, 0)
    assert rig.copies() == 3
    rig.cache.flush()
    assert rig.copies() == 3


# -- delivery


def test_a_step_delivers_the_key_like_any_other_and_its_bytes_cross_once(rig):
    for first in range(0, 12, 4):
        admitted = rig.backend.copy_gate.admitted
        rows = rig.run(more("A", 4) if first else new("A", [1, 2, 3], run=4))["A"]
        assert_both(rows, ("A", first, first + 4))
        rig.settle()
        assert rig.backend.copy_gate.admitted == admitted + 2, "the page, and the record"
        assert rig.copies() == first // 4 + 1
    # The copy that was delivered fed the pool, too: a hit needs no other.
    assert_both(rig.run(new("C", [1, 2, 3, 4], hit=12))["C"], ("A", 0, 12), ("C", 12, 16))
    rig.settle()
    assert rig.copies() == 4


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_steps_are_materialised_in_any_order(rig, order):
    steps = [rig.step(new("A", [1, 2, 3])), rig.step(more("A", 4)), rig.step(more("A", 4))]
    for index in order:
        assert_both(rig.take(steps[index], "A")["A"], ("A", 4 * index, 4 * index + 4))
    rig.settle()
    assert rig.copies() == 3
    assert rig.on_device() == (0, 0, 0)


@pytest.mark.parametrize("end", ["finish", "abort"])
def test_a_step_taken_late_is_delivered_from_its_own_page(rig, end):
    """Its record left the device long ago, and its block belongs to another request that has written there."""
    first = rig.step(new("A", [1]))
    second = rig.step(new("B", [1]), **{end: ["A"]})
    rig.cache.flush()
    assert_both(rig.take(first, "A")["A"], ("A", 0, 4))
    assert_both(rig.take(second, "B")["B"], ("B", 0, 4))
    assert rig.copies() == 2


def test_a_record_of_a_consumed_step_crosses_through_a_bounce_buffer(rig):
    """The step's page is long in use by others; two buffers carry any number of records."""
    for number in range(7):
        rig.discard(rig.step(new(f"r{number}", [number + 1])))
    rig.cache.flush()
    for number in range(7):
        hit = new(f"r{10 + number}", [number + 1, 9], hit=4, run=1)
        assert_both(rig.run(hit)[hit.req_id], (f"r{number}", 0, 4), (hit.req_id, 4, 5))


def test_rows_in_the_page_are_whole_although_the_step_is_given_up_meanwhile(make_rig):
    """The record's own hold keeps the page until its rows are in the pool."""
    rig = make_rig(staging_depth=1, staging_claim_timeout_s=SHORT_S)
    step = rig.step(new("A", [1]))
    rig.settle()
    with rig.runtime.stop_at("committer.deferred_copied") as copied:
        rig.begin(finish=["A"])
        copied.wait_reached()
        rig.discard(step)
        assert rig.cache.stats().staging_slots_in_use == 1
    rig.settle()
    assert rig.cache.stats().staging_slots_in_use == 0
    assert_both(rig.run(new("C", [1, 2], hit=4))["C"], ("A", 0, 4), ("C", 4, 8))


def test_padding_rows_and_rows_without_a_slot_are_left_out(rig):
    rig.begin(new("A", [1, 2], run=6))
    layout = rig.layout()
    layout.slots[4:] = -1
    assert_both(rig.take(rig.save(pad=2, layout=layout))["A"], ("A", 0, 6))
    rows = rig.run(new("C", [1, 3], hit=4))["C"]
    assert_both(rows, ("A", 0, 4), ("C", 4, 8))


def test_several_deferred_keys_make_one_record_and_one_transfer(make_rig):
    keys = {"wave": ((3,), torch.uint8), "code": ((), torch.float64)}
    rig = make_rig(deferred=(MEL, "wave", "code"), keys=keys)
    rig.discard(rig.step(new("A", [1, 2], run=7)))
    assert rig.on_device()[0] == 1
    rig.begin(finish=["A"])
    rig.settle()
    assert rig.copies() == 1
    rows = rig.run(new("C", [1, 3], hit=4))["C"]
    assert_both(rows, ("A", 0, 4), ("C", 4, 8))
    for key, (trailing, dtype) in keys.items():
        assert_mel(rows, ("A", 0, 4), ("C", 4, 8), key=key, trailing=trailing, dtype=dtype)


def test_a_deferred_key_may_be_missing_from_a_step(rig):
    rig.discard(rig.step(new("A", [1, 2], run=4)))
    rig.discard(rig.step(more("A", 4), keys=()))
    rows = rig.run(new("C", [1, 2, 3], hit=8))["C"]
    assert_rows(rows, ("A", 0, 8), ("C", 8, 12))
    assert rows.zero_ranges == {MEL: ((4, 8),)}


# -- hits


def test_a_hit_on_rows_still_on_the_device_fetches_them_and_the_older_ones(rig):
    rig.discard(rig.step(new("A", [1])))
    rig.discard(rig.step(new("B", [2])))
    rig.discard(rig.step(new("D", [3])))
    rig.settle()
    step = rig.step(new("C", [2, 4], hit=4))
    assert_both(rig.take(step)["C"], ("B", 0, 4), ("C", 4, 8))
    assert rig.copies() == 4, "the read forced two records, the delivery the third and the step's own"
    assert rig.on_device() == (0, 0, 0)


def test_a_read_forces_no_record_younger_than_it_wants(rig):
    for number, req_id in enumerate("ABD"):
        rig.discard(rig.step(new(req_id, [number + 1])))
    rig.begin(new("C", [2, 4], hit=4))
    rig.settle()
    assert rig.copies() == 2
    assert rig.on_device() == (1, CHUNK_BYTES, 1)
    rig.discard(rig.save())


def test_a_hit_on_rows_of_the_same_step(rig):
    step = rig.step(new("A", [1, 2], run=8), new("C", [1, 2, 3], hit=8))
    taken = rig.take(step)
    assert_both(taken["A"], ("A", 0, 8))
    assert_both(taken["C"], ("A", 0, 8), ("C", 8, 12))
    assert rig.copies() == 1


def test_a_hit_over_two_writes_reads_both(rig):
    rig.discard(rig.step(new("A", [1, 2], run=4)))
    rig.cache.flush()
    rig.discard(rig.step(more("A", 4)))
    rig.settle()
    assert rig.copies() == 1
    with rig.held():
        rig.begin(new("C", [1, 2, 3], hit=8), finish=["A"])
        with pytest.raises(JoinTimeoutError, match=r"deferred write 2 of request 'A' \(1 record\)"):
            rig.cache.flush(SHORT_S)
    assert_both(rig.take(rig.save())["C"], ("A", 0, 8), ("C", 8, 12))


def test_one_open_write_gathers_all_chunks_until_it_is_forced(rig):
    for number in range(3):
        rig.step(more("A", 4) if number else new("A", [1, 2, 3], run=4))
    assert rig.on_device() == (3, 3 * CHUNK_BYTES, 1)
    with rig.held():
        rig.begin(finish=["A"])
        with pytest.raises(JoinTimeoutError, match=r"deferred write 1 of request 'A' \(3 records\) \(write \d+, "):
            rig.cache.flush(SHORT_S)


def test_forcing_one_requests_records_closes_the_writes_of_its_neighbours(rig):
    rig.step(new("A", [1]), new("B", [2, 3]))
    rig.step(more("B", 4), finish=["A"])
    rig.settle()
    assert rig.on_device() == (1, CHUNK_BYTES, 1)
    with rig.held():
        rig.begin(finish=["B"])
        with pytest.raises(JoinTimeoutError, match=r"deferred write 2 of request 'B' \(1 record\)"):
            rig.cache.flush(SHORT_S)


# -- owed rows, blocks that change hands


def test_rows_of_discarded_steps_come_with_a_later_one(rig):
    rig.discard(rig.step(new("A", [1, 2], run=4)))
    assert rig.copies() == 0
    assert_both(rig.run(more("A", 4))["A"], ("A", 0, 8))
    assert rig.copies() == 2
    rig.assert_nothing_held()


def test_a_block_recycled_while_its_rows_are_on_the_device_keeps_the_later_rows(rig):
    """A was preempted: nobody announced its end, and block 1 went to B in between."""
    rig.discard(rig.step(new("A", [1, 2], run=8)))
    rig.discard(rig.step(new("B", [1])))
    assert rig.copies() == 0
    assert_both(rig.run(new("C", [1, 3], hit=4))["C"], ("B", 0, 4), ("C", 4, 8))
    assert_both(rig.run(new("D", [5, 2, 4], hit=0, run=12))["D"], ("D", 0, 12))


def test_a_preempted_request_that_comes_back_goes_on_with_its_write(rig):
    rig.discard(rig.step(new("A", [1, 2], run=8)))
    rig.discard(rig.step(new("B", [1])))
    taken = rig.run(back("A", [4, 5, 6], run=12))
    assert_both(taken["A"], ("A", 0, 12))
    assert_both(rig.run(new("C", [4, 5, 6, 7], hit=12))["C"], ("A", 0, 12), ("C", 12, 16))


def test_rows_a_read_still_wants_are_set_aside_when_a_record_lands_on_them(rig):
    rig.run(new("A", [1]))
    rig.settle()
    with rig.runtime.stop_at("prefetch.landed") as before_gather:
        hit = rig.step(new("C", [1, 2], hit=4))
        before_gather.wait_reached()
        rig.discard(rig.step(new("E", [1]), finish=["A"]))
        rig.cache.flush()
        assert rig.cache.stats().rows_rescued == 8, "four hidden rows, four of the deferred key"
    assert_both(rig.take(hit, "C")["C"], ("A", 0, 4), ("C", 4, 8))


def test_a_reader_waits_for_the_record_it_wants_and_not_for_the_next_tenants(rig):
    """The read wants A's rows, which are on the device; behind them in line are E's for the same block."""
    rig.discard(rig.step(new("A", [1])))
    with rig.held():
        hit = rig.step(new("C", [1, 2], hit=4))
        rig.discard(rig.step(new("E", [1]), finish=["A", "C"]))
        rig.begin(finish=["E"])
        taker = rig.taking(hit, "C")
    assert_both(taker.result()["C"], ("A", 0, 4), ("C", 4, 8))


# -- block copies


def test_a_block_copy_brings_deferred_rows_along(rig):
    rig.discard(rig.step(new("A", [1, 2], run=8)))
    rows = rig.run(new("C", [1, 3], hit=6, run=2), copies=[(2, 3)])["C"]
    assert_both(rows, ("A", 0, 6), ("C", 6, 8))
    assert_both(rig.run(new("D", [1, 3, 4], hit=8))["D"], ("A", 0, 6), ("C", 6, 8), ("D", 8, 12))


def test_a_block_copy_whose_source_is_in_the_pool_forces_nothing(rig):
    rig.run(new("A", [1]))
    rig.discard(rig.step(new("B", [2])))
    rig.settle()
    copies = rig.copies()
    rig.begin(new("C", [3], hit=2, run=2), copies=[(1, 3)])
    rig.settle()
    assert rig.copies() == copies
    assert rig.on_device()[0] == 1
    assert_both(rig.take(rig.save())["C"], ("A", 0, 2), ("C", 2, 4))


def test_rows_on_the_device_do_not_land_over_a_later_block_copy(rig):
    """Block 3 held rows of a preempted request, still on the device, when another block was copied onto it."""
    rig.run(new("A", [1]))
    rig.discard(rig.step(new("B", [3])))
    rig.discard(rig.step(new("C", [3, 4], hit=4, run=2), copies=[(1, 3)]))
    rig.cache.flush()
    assert_both(rig.run(new("D", [3, 5], hit=4))["D"], ("A", 0, 4), ("D", 4, 8))


# -- rows that cannot wait


def test_without_a_budget_every_row_is_copied_at_once(make_rig):
    rig = make_rig(budget_bytes=0)
    assert rig.backend.device_bytes == rig.config.staging_depth * rig.config.staging_arena_bytes
    rig.discard(rig.step(new("A", [1, 2], run=8)))
    assert rig.on_device() == (0, 0, 0)
    assert_both(rig.run(new("C", [1, 2, 3], hit=8))["C"], ("A", 0, 8), ("C", 8, 12))
    assert rig.copies() == 0


def test_a_record_larger_than_the_budget_is_copied_at_once_behind_the_older_ones(make_rig):
    """Its slots were written by a record before: the rows of the larger one must be the ones that stay."""
    rig = make_rig(budget_bytes=2 * CHUNK_BYTES, num_blocks=32)
    rig.discard(rig.step(new("A", [1])))
    rig.discard(rig.step(new("B", [1, 2, 3, 4], run=12)))
    rig.settle()
    assert rig.on_device() == (0, 0, 0)
    assert rig.copies() == 1
    rows = rig.run(new("C", [1, 2, 3, 5], hit=12))["C"]
    assert_both(rows, ("B", 0, 12), ("C", 12, 16))


def test_a_value_on_the_host_is_copied_at_once_behind_the_older_ones(make_rig):
    runtime = ControlledRuntime()
    rig = make_rig(
        runtime=runtime,
        backend=FloatsOnTheDevice(runtime),
        deferred=(MEL, "code"),
        keys={"code": ((2,), torch.int64)},
    )
    rig.discard(rig.step(new("A", [1])))
    assert rig.on_device() == (1, CHUNK_BYTES, 1), "mel waits, code does not"
    rig.discard(rig.step(new("B", [1, 2], run=8)))
    rows = rig.run(new("C", [1, 2, 3], hit=8))["C"]
    assert_both(rows, ("B", 0, 8), ("C", 8, 12))
    assert_mel(rows, ("B", 0, 8), ("C", 8, 12), key="code", trailing=(2,), dtype=torch.int64)


def test_a_deferred_key_that_comes_without_a_row_per_token_is_passed_on(rig):
    rig.begin(new("A", [1, 2], run=5))
    rows = rig.take(rig.save({MEL: torch.ones(3, 4)}, keys=()))["A"]
    assert torch.equal(rows.leftovers[MEL], torch.ones(3, 4))
    assert rig.on_device() == (0, 0, 0)


# -- policies


@pytest.mark.parametrize("hidden", [True, None])
def test_a_policy_without_hidden_rows_defers_all_the_same(make_rig, hidden):
    rig = make_rig(needs_full_hidden_states=False)
    rig.discard(rig.step(new("A", [1, 2], run=8), hidden=hidden))
    assert rig.on_device() == (1, 2 * CHUNK_BYTES, 1)
    rows = rig.run(new("C", [1, 2, 3], hit=8), hidden=hidden)["C"]
    assert_mel(rows, ("A", 0, 8), ("C", 8, 12))
    assert set(rig.cache.stats().key_row_bytes) == {MEL}
    if hidden is None:
        assert rig.backend.copy_gate.admitted == rig.copies() == 2, "nothing but the two records crossed"


def test_the_ring_and_the_bounce_buffers_are_allocated_with_the_policy_and_never_after(make_rig):
    rig = make_rig(budget_bytes=4 * CHUNK_BYTES)
    before = (rig.backend.pinned_allocations, rig.backend.device_allocations)
    assert before[1] == rig.config.staging_depth + 1
    for number in range(12):
        step = rig.step(new(f"r{number}", [number + 1]), finish=[f"r{number - 1}"])
        rig.take(step).release() if number % 2 else rig.discard(step)
    rig.cache.flush()
    assert (rig.backend.pinned_allocations, rig.backend.device_allocations) == before
    stats = rig.cache.stats()
    assert stats.device_bytes == rig.backend.device_bytes


def test_a_policy_whose_memory_is_refused_changes_nothing(make_rig):
    staging = 4 * 1024
    rig = make_rig(deferred=(), backend_options={"max_pinned_bytes": 4 * (64 * 12 + staging)}, max_num_tokens=64,
                   extra_row_bytes=0, extra_step_bytes=staging)  # fmt: skip
    held = (rig.backend.pinned_bytes, rig.backend.device_bytes)
    with pytest.raises(MemoryError):
        rig.cache.register_policy(ModelCachePolicy(deferred_keys={MEL}))
    assert (rig.backend.pinned_bytes, rig.backend.device_bytes) == held
    assert_mel(rig.run(new("A", [1]))["A"], ("A", 0, 4))
    assert rig.on_device() == (0, 0, 0)


def test_a_second_policy_takes_the_place_of_the_first(make_rig):
    rig = make_rig()
    held = (rig.backend.pinned_bytes, rig.backend.device_bytes)
    rig.cache.register_policy(ModelCachePolicy(deferred_keys={MEL}))
    assert (rig.backend.pinned_bytes, rig.backend.device_bytes) == held
    rig.discard(rig.step(new("A", [1])))
    assert rig.on_device() == (1, CHUNK_BYTES, 1)
    with pytest.raises(StepOrderError, match="register it at load"):
        rig.cache.register_policy(ModelCachePolicy())
    assert_both(rig.run(new("C", [1, 2], hit=4))["C"], ("A", 0, 4), ("C", 4, 8))


def test_an_undeclared_key_beside_a_deferred_one_crosses_with_the_page(make_rig):
    rig = make_rig(keys={"codes": MEL_SPEC})
    rig.discard(rig.step(new("A", [1, 2], run=8)))
    rig.settle()
    assert rig.on_device() == (1, 2 * CHUNK_BYTES, 1)
    rows = rig.run(new("C", [1, 2, 3], hit=8))["C"]
    assert_both(rows, ("A", 0, 8), ("C", 8, 12))
    assert_mel(rows, ("A", 0, 8), ("C", 8, 12), key="codes")
