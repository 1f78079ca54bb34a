# SPDX-License-Identifier: Apache-2.0
"""Faults 1f: copies, their order, locks, threads and the end."""

import pytest
import torch
from cache_rig import SHORT_S, CacheRig, more, new
from controlled_runtime import ControlledRuntime
from omni_core_cpu_sim import CpuSimBackend
from row_values import assert_rows
from torch.utils._python_dispatch import TorchDispatchMode

from omni_core.prefix_cache.errors import CacheClosedError

STATE_LOCK = "prefix-cache"


class LateDevice(CpuSimBackend):
    """A device whose own work runs behind the caller: a forward's rows, and their snapshots, come late."""

    def __init__(self, runtime):
        super().__init__(runtime)
        self._compute = self.new_stream("compute")

    def current_stream(self):
        return self._compute

    def forward(self, output, values):
        """Queue a forward that will write `values` into `output`."""
        self._compute.queue_copy(output, values)

    def refresh_snapshot(self, clone, tensor):
        self._compute.queue_copy(clone, tensor)

    def copy_to_host(self, destination, source, stream):
        stream.wait(self._compute.record())
        return super().copy_to_host(destination, source, stream)


def test_fault_091_rows_are_those_of_a_forward_that_finishes_after_the_save(make_rig):
    runtime = ControlledRuntime()
    device = LateDevice(runtime)
    rig = make_rig(runtime=runtime, backend=device)
    with rig.held():
        rig.begin(new("A", [5]))
        output = torch.zeros(4, 3)
        device.forward(output, rig.rows())
        first = rig.save(hidden=output)
        taker = rig.taking(first)
        for _ in ("forward", "snapshot"):
            device.copy_gate.wait_until_waiting(1, timeout_s=30)
            device.copy_gate.let_through(1)
        second = rig.step(new("C", [5, 6], hit=4))
        assert not taker.done
    assert_rows(taker.result()["A"], ("A", 0, 4))
    assert_rows(rig.take(second)["C"], ("A", 0, 4), ("C", 4, 8))


def test_fault_092_one_staging_buffer_is_not_overwritten_before_its_copy_ran(make_rig):
    rig = make_rig(staging_depth=1)
    with rig.held():
        first = rig.step(new("A", [1]))
        first_taker = rig.taking(first)
        rig.begin(new("B", [2]))
        second_save = rig.call("engine", rig.save)
        rig.runtime.wait_until_waiting("engine")
        assert not second_save.done
    assert_rows(first_taker.result()["A"], ("A", 0, 4))
    assert_rows(rig.take(second_save.result(), "B")["B"], ("B", 0, 4))
    taken = rig.run(new("C", [1, 3], hit=4), new("D", [2, 4], hit=4))
    assert_rows(taken["C"], ("A", 0, 4), ("C", 4, 8))
    assert_rows(taken["D"], ("B", 0, 4), ("D", 4, 8))


def test_fault_094_a_copy_that_completes_steps_later_is_credited_to_its_own_step(rig):
    with rig.held():
        first = rig.step(new("A", [1]))
        second = rig.step(new("B", [2]))
        rig.begin(new("C", [1, 3], hit=4), finish=["A"])
        first_taker = rig.taking(first, "A")
        rig.backend.copy_gate.let_through(1)
        assert_rows(first_taker.result()["A"], ("A", 0, 4))
        third = rig.save()
    assert_rows(rig.take(third)["C"], ("A", 0, 4), ("C", 4, 8))
    assert_rows(rig.take(second, "B")["B"], ("B", 0, 4))


def test_fault_096_a_read_and_a_write_at_the_same_time_share_no_buffer(rig):
    rig.run(new("A", [1]), new("B", [2]))
    rig.cache.flush()
    with rig.runtime.stop_at("prefetch.gathered") as reading, rig.runtime.stop_at("committer.write") as writing:
        hit = rig.step(new("C", [1, 3], hit=4))
        reading.wait_reached()
        writing.wait_reached()
        written = rig.step(new("D", [2, 4], hit=4))
    assert_rows(rig.take(hit, "C")["C"], ("A", 0, 4), ("C", 4, 8))
    assert_rows(rig.take(written, "D")["D"], ("B", 0, 4), ("D", 4, 8))
    taken = rig.run(new("E", [1, 3, 5], hit=8), new("F", [2, 4, 6], hit=8), finish=["A", "B", "C", "D"])
    assert_rows(taken["E"], ("A", 0, 4), ("C", 4, 8), ("E", 8, 12))
    assert_rows(taken["F"], ("B", 0, 4), ("D", 4, 8), ("F", 8, 12))


class LockWatch(TorchDispatchMode):
    """Notes every torch operation that its thread runs while it holds the state lock."""

    def __init__(self, runtime, under_lock, counted):
        super().__init__()
        self._runtime = runtime
        self._under_lock = under_lock
        self._counted = counted

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._counted.append(str(func))
        if self._runtime.holds(STATE_LOCK):
            self._under_lock.append(str(func))
        return func(*args, **(kwargs or {}))


class WatchedRuntime(ControlledRuntime):
    """A runtime whose every thread is watched."""

    def __init__(self):
        self.under_lock, self.counted = [], []
        super().__init__(around_thread=self.watch)

    def watch(self):
        return LockWatch(self, self.under_lock, self.counted)


def settled_lock_entries(rig):
    """How often the state lock was taken, once every write has landed and the committer sleeps."""
    rig.cache.flush()
    rig.runtime.wait_until_waiting("omni-core-committer", on="committer-work")
    return rig.runtime.lock_entries[STATE_LOCK]


def reclaim_all_under_a_pending_read(make_rig, num_tokens):
    """A read of `num_tokens` rows is pending while every one of their slots is written again."""
    rig = make_rig(runtime=WatchedRuntime(), num_blocks=num_tokens // 64 + 1, block_size=64, max_num_tokens=num_tokens)
    blocks = list(range(num_tokens // 64))
    with rig.runtime.watch():
        rig.run(new("A", blocks, run=num_tokens))
        with rig.runtime.stop_at("prefetch.landed") as before_gather:
            hit = rig.step(new("C", [*blocks, len(blocks)], hit=num_tokens, run=4))
            before_gather.wait_reached()
            entries = settled_lock_entries(rig)
            reclaimed = rig.step(new("E", blocks, run=num_tokens), finish=["A", "C"])
            entries = settled_lock_entries(rig) - entries
        assert_rows(rig.take(hit, "C")["C"], ("A", 0, num_tokens), ("C", num_tokens, num_tokens + 4))
        rig.cache.discard_step(reclaimed)
    assert rig.cache.stats().rows_rescued == num_tokens
    return rig.runtime, entries


def test_fault_097_rescue_copies_run_outside_the_state_lock(make_rig):
    few, entries_of_few = reclaim_all_under_a_pending_read(make_rig, 64)
    many, entries_of_many = reclaim_all_under_a_pending_read(make_rig, 4096)
    assert entries_of_few == entries_of_many
    for runtime in (few, many):
        assert len(runtime.counted) > 10
        assert runtime.under_lock == []
        with runtime.watch(), runtime.lock(STATE_LOCK):
            torch.zeros(1)
        assert len(runtime.under_lock) == 1, "the watch sees an operation under the lock"


def test_fault_099_the_step_path_waits_for_no_copy_and_makes_one_per_step(make_rig):
    rig = make_rig(keys={"codes": ((16,), torch.int64), "mel": ((4, 2), torch.bfloat16)}, staging_depth=6)
    with rig.held():
        rig.begin(new("A", [1]), new("B", [2]))
        steps = [rig.save({"list": [torch.ones(2), torch.ones(5)]})]
        steps += [
            rig.step(more("A", blocks=[3 + number]), new(f"r{number}", [1, 9 + number], hit=4)) for number in range(5)
        ]
        assert rig.backend.copy_gate.admitted == 0
        assert "MainThread" not in {thread for thread, _ in rig.runtime.waits}
    rig.cache.flush()
    assert rig.backend.copy_gate.admitted == len(steps)
    for step in steps:
        rig.cache.discard_step(step)


def test_fault_103_close_drains_a_copy_that_is_slow(make_rig):
    rig = make_rig()
    with rig.held():
        rig.step(new("A", [1]))
        closer = rig.call("closer", lambda: rig.cache.close(30))
        rig.wait_until_copying()
        assert not closer.done
        assert rig.backend.pinned_bytes > 0
    assert closer.result() is True
    assert rig.backend.pinned_bytes == 0


def test_fault_103_close_gives_up_on_a_copy_that_never_ends_and_unmaps_nothing():
    rig = CacheRig()
    with rig.held():
        rig.step(new("A", [1]))
        closer = rig.call("closer", lambda: rig.cache.close(SHORT_S))
        assert closer.result(timeout_s=5) is False
        assert rig.backend.pinned_bytes > 0
        assert rig.backend.device_bytes > 0
        with pytest.raises(CacheClosedError):
            rig.begin()
    rig.stop()


def test_fault_103_close_unmaps_no_page_that_a_reader_still_reads(make_rig):
    rig = make_rig()
    step = rig.step(new("A", [1]))
    rig.cache.flush()
    with rig.runtime.stop_at("materialize.join") as reading:
        taker = rig.call("taker", lambda: rig.take(step, "A"))
        reading.wait_reached()
        closer = rig.call("closer", lambda: rig.cache.close(30))
        rig.runtime.wait_until_waiting("closer")
        assert rig.backend.pinned_bytes > 0
    assert_rows(taker.result()["A"], ("A", 0, 4))
    assert closer.result() is True


def test_fault_103_close_gives_up_on_a_reader_that_never_ends_and_unmaps_nothing(make_rig):
    rig = make_rig()
    step = rig.step(new("A", [1]))
    rig.cache.flush()
    with rig.runtime.stop_at("materialize.join") as reading:
        taker = rig.call("taker", lambda: rig.take(step, "A"))
        reading.wait_reached()
        assert rig.cache.close(SHORT_S) is False
        assert rig.backend.pinned_bytes > 0
    assert_rows(taker.result()["A"], ("A", 0, 4))
    assert rig.cache.close() is True
    assert rig.backend.pinned_bytes == 0
