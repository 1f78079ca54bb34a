# SPDX-License-Identifier: Apache-2.0
"""Pre-touch: known keys' memory is there when the policy is registered, from several threads, and rows are as ever."""

import threading

import pytest
import torch
from cache_rig import more, new
from controlled_runtime import PATIENCE_S, ControlledRuntime
from row_values import assert_rows

from omni_core.backend.host_pages import reserve_pages
from omni_core.prefix_cache.block_pool import RowSpec
from omni_core.prefix_cache.config import HIDDEN_KEY
from omni_core.prefix_cache.errors import HostMemoryError, JoinTimeoutError
from omni_core.prefix_cache.policy import ModelCachePolicy
from omni_core.prefix_cache.pretouch import PIECE_BYTES, PretouchProgress, pretouch

CODES = {"codes": RowSpec((16,), torch.int64)}
NUM_SLOTS = 16 * 1024
HIDDEN_BYTES = NUM_SLOTS * 64 * 4
CODES_BYTES = NUM_SLOTS * 128
KEYS = {"codes": ((16,), torch.int64)}


def large(make_rig, **options):
    return make_rig(num_blocks=4096, hidden=64, **({"policy": ModelCachePolicy(), "keys": KEYS} | options))


def test_known_keys_are_resident_before_the_first_step_and_others_are_not(make_rig):
    rig = large(make_rig, pretouch=True, key_rows=CODES)
    assert rig.cache.resident_pool_bytes() == {HIDDEN_KEY: HIDDEN_BYTES, "codes": CODES_BYTES}
    assert rig.cache.stats().memory.pool_bytes == {HIDDEN_KEY: HIDDEN_BYTES, "codes": CODES_BYTES}
    assert rig.cache.stats().key_row_bytes == {}, "a key is stored from its first save on"
    rig.run(new("A", [1]), outputs={"other": torch.ones(4, 2)})
    rig.cache.flush()
    assert rig.cache.resident_pool_bytes() == {HIDDEN_KEY: HIDDEN_BYTES, "codes": CODES_BYTES, "other": 4096}


def test_without_it_memory_comes_as_blocks_are_written(make_rig):
    rig = large(make_rig, key_rows=CODES)
    assert rig.cache.resident_pool_bytes() == {}
    rig.run(new("A", [1]))
    rig.cache.flush()
    assert rig.cache.resident_pool_bytes() == {HIDDEN_KEY: 4096, "codes": 4096}


def test_rows_are_right_in_memory_that_was_touched_before(make_rig):
    rig = large(make_rig, pretouch=True, key_rows=CODES)
    rig.run(new("A", [1, 2], run=8))
    taken = rig.run(new("C", [1, 2, 3], hit=8), more("A", 1, blocks=[4]))
    assert_rows(taken["C"], ("A", 0, 8), ("C", 8, 12), trailing=(64,))
    assert_rows(taken["C"], ("A", 0, 8), ("C", 8, 12), key="codes", trailing=(16,), dtype=torch.int64)


def test_a_stage_that_keeps_no_hidden_rows_touches_none(make_rig):
    policy = ModelCachePolicy(needs_full_hidden_states=False)
    rig = large(make_rig, pretouch=True, key_rows=CODES, policy=policy)
    assert rig.cache.resident_pool_bytes() == {"codes": CODES_BYTES}


def test_a_key_that_comes_with_other_rows_than_declared_is_stored_as_it_comes(make_rig):
    rig = large(make_rig, pretouch=True, key_rows={"codes": RowSpec((8,), torch.int64)})
    rig.run(new("A", [1]))
    taken = rig.run(new("C", [1, 2], hit=4))
    assert_rows(taken["C"], ("A", 0, 4), ("C", 4, 8), key="codes", trailing=(16,), dtype=torch.int64)
    assert rig.cache.stats().memory.pool_bytes["codes"] == CODES_BYTES


def test_progress_is_told_on_the_callers_thread_and_ends_with_everything(make_rig):
    rig = large(make_rig, pretouch=True, key_rows=CODES, policy=None)
    told = []
    rig.cache.register_policy(
        ModelCachePolicy(), on_pretouch=lambda progress: told.append((threading.current_thread().name, progress))
    )
    assert {name for name, _ in told} == {threading.current_thread().name}
    progress = [progress for _, progress in told]
    assert progress[-1] == PretouchProgress(HIDDEN_BYTES + CODES_BYTES, HIDDEN_BYTES + CODES_BYTES)
    assert [each.done_bytes for each in progress] == sorted(each.done_bytes for each in progress)


# -- the threads


def ranges(pieces):
    return [reserve_pages(pieces * PIECE_BYTES - 4096, overcommit=True)]


def test_fault_088_several_threads_touch_at_the_same_time(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    together = threading.Barrier(4)
    runtime = ControlledRuntime()
    seen = []

    def commit(piece):
        together.wait(PATIENCE_S)
        seen.append((piece.data_ptr(), piece.numel()))

    [pages] = ranges(8)
    pretouch([pages], runtime, stuck_after_s=PATIENCE_S, commit=commit)
    starts = [pages.data_ptr() + number * PIECE_BYTES for number in range(8)]
    assert sorted(seen) == [(start, PIECE_BYTES) for start in starts[:-1]] + [(starts[-1], PIECE_BYTES - 4096)]
    assert runtime.living_threads() == []


def test_memory_that_is_refused_ends_every_thread_and_says_how_far_it_came():
    runtime = ControlledRuntime()
    calls = []

    def commit(piece):
        calls.append(piece)
        if len(calls) == 3:
            raise MemoryError("none left")

    with pytest.raises(HostMemoryError, match=r"of \d+ bytes were committed, then: none left; .*pretouch=False"):
        pretouch(ranges(50), runtime, stuck_after_s=PATIENCE_S, commit=commit)
    assert len(calls) < 50
    assert runtime.living_threads() == []


def test_a_touch_that_never_returns_is_an_error_after_a_bounded_time():
    let_go = threading.Event()
    with pytest.raises(JoinTimeoutError, match=r"join_timeout_s=0.05; 0 of \d+ bytes are"):
        pretouch(ranges(2), ControlledRuntime(), stuck_after_s=0.05, commit=lambda _: let_go.wait(PATIENCE_S))
    let_go.set()
