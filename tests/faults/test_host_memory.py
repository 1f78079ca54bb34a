# SPDX-License-Identifier: Apache-2.0
"""Faults 1e: memory is known before it is needed, pinned to the byte, in pieces where needed, or cleanly refused."""

import logging
import resource
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from cache_rig import more, new
from controlled_runtime import ControlledRuntime
from deferred_rig import deferred_rigs
from omni_core_cpu_sim import CpuSimBackend
from row_values import assert_rows

from omni_core.backend.host_pages import PAGE_BYTES
from omni_core.prefix_cache.config import HIDDEN_KEY, PrefixCacheConfig
from omni_core.prefix_cache.errors import HostMemoryError
from omni_core.prefix_cache.manager import OmniPrefixCacheManager
from omni_core.prefix_cache.policy import ModelCachePolicy
from omni_core.prefix_cache.sizing import StageSizes, plan_cache

CHUNK = 16 * PAGE_BYTES
ARENA_SETTINGS = {"max_num_tokens": 64, "extra_step_bytes": 5 * CHUNK, "pin_chunk_bytes": CHUNK}


def cache_on(backend, runtime, **settings):
    config = PrefixCacheConfig(
        **{"num_blocks": 16, "block_size": 4, "hidden_size": 3, "hidden_dtype": torch.float32, "max_num_tokens": 64}
        | settings
    )
    return OmniPrefixCacheManager(config, backend, lambda: None, runtime=runtime, device=torch.device("cpu"))


def test_fault_080_without_an_accelerator_staging_is_ordinary_memory_and_the_figures_say_so(make_rig):
    rig = make_rig()
    assert not rig.backend.capabilities.pinned_memory
    stats = rig.cache.stats()
    assert stats.pinned_bytes == 0
    assert stats.memory.staging_bytes == 4 * rig.config.staging_arena_bytes
    assert_rows(rig.run(new("A", [1]))["A"], ("A", 0, 4))


def test_fault_082_what_all_ranks_of_the_host_take_is_logged(caplog):
    runtime = ControlledRuntime()
    with caplog.at_level(logging.INFO, logger="omni_core"):
        cache = cache_on(CpuSimBackend(runtime), runtime, caches_per_host=8)
        cache.register_policy(ModelCachePolicy())
    each = cache.stats().memory
    total = 8 * (2 * each.staging_bytes + each.shared_table_bytes + each.max_recycled_bytes + 16 * 4 * (12 + 16))
    assert f"caches on this host can come to {total} bytes ({total // 8} each)" in caplog.text
    assert cache.close()


@pytest.mark.parametrize("max_pin_bytes", [CHUNK, None])
def test_fault_085_086_a_cache_whose_pages_are_pinned_in_pieces_serves_as_ever(make_rig, max_pin_bytes):
    rig = make_rig(
        backend_options={"max_pin_bytes": max_pin_bytes}, keys={"codes": ((4,), torch.int64)}, **ARENA_SETTINGS
    )
    pieces = -(-rig.config.staging_arena_bytes // CHUNK)
    assert pieces > 5
    assert rig.backend.num_pins == 4 * pieces
    rig.run(new("A", [1, 2], run=8))
    taken = rig.run(new("C", [1, 2, 3], hit=8), more("A", 1, blocks=[4]))
    assert_rows(taken["C"], ("A", 0, 8), ("C", 8, 12))
    assert_rows(taken["C"], ("A", 0, 8), ("C", 8, 12), key="codes", trailing=(4,), dtype=torch.int64)


def test_fault_085_without_pieces_a_refused_page_names_the_size_and_the_setting():
    runtime = ControlledRuntime()
    backend = CpuSimBackend(runtime, max_pin_bytes=CHUNK)
    with pytest.raises(MemoryError, match=rf"\d+ bytes, was not page-locked: .*max_pin_bytes={CHUNK}.*pin_chunk_bytes"):
        cache_on(backend, runtime, **ARENA_SETTINGS | {"pin_chunk_bytes": 0})
    assert (backend.num_pins, backend.pinned_bytes, backend.device_bytes) == (0, 0, 0)


def test_fault_087_planned_reported_and_real_pinned_bytes_are_the_same():
    with deferred_rigs() as make:
        rig = make(budget_bytes=1 << 20, backend_options={"report_arenas_as_pinned": True}, **ARENA_SETTINGS)
        planned = plan_cache(rig.config, {HIDDEN_KEY: 12}, has_deferred=True)
        stats = rig.cache.stats()
        assert planned.pinned_bytes == stats.memory.pinned_bytes == stats.pinned_bytes == rig.backend.pinned_bytes
        assert planned.device_bytes == stats.device_bytes == rig.backend.device_bytes
        assert stats.memory.bounce_bytes == planned.bounce_bytes > 0
        sizes = [planned.staging_bytes // 4] * 4 + [planned.bounce_bytes // 2] * 2
        assert rig.backend.num_pins == sum(-(-nbytes // CHUNK) for nbytes in sizes) > len(sizes)


@pytest.mark.parametrize("refused", [1, 9, 20])
def test_fault_090_a_refused_pin_leaves_nothing_and_a_later_cache_works(refused):
    runtime = ControlledRuntime()
    backend = CpuSimBackend(runtime, refused_pins=(refused,))
    with pytest.raises(MemoryError, match="the simulated driver refuses"):
        cache_on(backend, runtime, **ARENA_SETTINGS)
    assert (backend.num_pins, backend.pinned_bytes, backend.device_bytes) == (0, 0, 0)
    assert backend.pins_tried == refused, "nothing smaller was tried"
    assert runtime.living_threads() == []
    cache = cache_on(backend, runtime, **ARENA_SETTINGS)
    assert cache.stats().memory.staging_bytes > 0
    assert cache.close()


def test_fault_090_size_is_checked_before_anything_is_asked_of_the_driver():
    runtime = ControlledRuntime()
    backend = CpuSimBackend(runtime)
    with pytest.raises(HostMemoryError, match="staging_depth=4, max_num_tokens=1099511627776"):
        cache_on(backend, runtime, max_num_tokens=1 << 40)
    assert (backend.pins_tried, backend.pinned_bytes) == (0, 0)


# A row of 256 KiB: the hidden rows of a million blocks are 4 TiB, more than any machine that runs this has.
LARGE = {"num_blocks": 1 << 20, "block_size": 16, "hidden_size": 1 << 16, "max_num_tokens": 16, "max_recycled_bytes": 0}
NO_HIDDEN = ModelCachePolicy(needs_full_hidden_states=False)


def test_fault_082_a_stage_that_keeps_no_hidden_rows_is_not_judged_by_them(caplog):
    runtime = ControlledRuntime()
    with caplog.at_level(logging.INFO, logger="omni_core"):
        cache = cache_on(CpuSimBackend(runtime), runtime, pretouch=True, **LARGE)
        cache.register_policy(NO_HIDDEN)
    assert [record.levelname for record in caplog.records] == ["INFO"], "said once, and no warning"
    planned = StageSizes(cache.config, keeps_hidden=False, device_is_host=True).plan()
    assert cache.stats().memory == planned.cache
    assert f"can come to {planned.most_on_host_bytes} bytes" in caplog.text
    assert cache.close()


def test_fault_082_rows_that_do_not_fit_are_refused_before_any_is_touched():
    runtime = ControlledRuntime()
    backend = CpuSimBackend(runtime)
    cache = cache_on(backend, runtime, pretouch=True, **LARGE)
    pins, device_bytes = backend.pins_tried, backend.device_bytes
    with pytest.raises(HostMemoryError, match=r"pretouch=True.*Any of these lets it start:.*pretouch 1 → 0"):
        cache.register_policy(ModelCachePolicy(deferred_keys={"mel"}))
    assert (backend.pins_tried, backend.device_bytes) == (pins, device_bytes)
    assert cache.resident_pool_bytes() == {}
    cache.register_policy(NO_HIDDEN)
    assert cache.close()


def test_fault_082_rows_that_may_not_fit_are_one_warning(caplog):
    runtime = ControlledRuntime()
    with caplog.at_level(logging.INFO, logger="omni_core"):
        cache = cache_on(CpuSimBackend(runtime), runtime, **LARGE)
        cache.register_policy(ModelCachePolicy())
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"num_blocks={1 << 20} x block_size=16 x {1 << 18} bytes" in caplog.text
    assert cache.close()


def test_fault_081_a_key_that_comes_late_costs_no_memory_when_it_is_saved(make_rig):
    rig = make_rig(num_blocks=1 << 20, block_size=16, max_num_tokens=64)
    rig.run(new("A", [1], run=16))
    with rig.held():
        step = rig.step(new("B", [2], run=16), outputs={"late": torch.ones(16, 512)})
        assert rig.cache.stats().memory.pool_bytes["late"] == (1 << 24) * 2048
        assert rig.cache.resident_pool_bytes()["late"] == 0
    rig.take(step)
    rig.cache.flush()
    assert rig.cache.resident_pool_bytes()["late"] == 16 * 2048


def test_fault_081_address_space_the_system_does_not_have_is_an_error_of_that_step_alone(make_rig):
    rig = make_rig(num_blocks=1 << 22, block_size=16, max_num_tokens=16, extra_step_bytes=64 << 20, staging_depth=1)
    rig.run(new("A", [1], run=1))
    rig.begin(new("B", [2], run=2))
    with pytest.raises(
        HostMemoryError, match=rf"'huge': num_blocks={1 << 22} x block_size=16 x {1 << 24} bytes of row"
    ):
        rig.save({"huge": torch.zeros(2, 1 << 22)})
    assert "huge" not in rig.cache.stats().key_row_bytes
    assert_rows(rig.run(new("C", [3], run=1), finish=["B"])["C"], ("C", 0, 1))


@contextmanager
def address_space_left(nbytes):
    """The process gets no more address space than so much beyond what it has."""
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * PAGE_BYTES
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_fault_081_tables_the_system_has_no_address_space_for_are_an_error_of_that_step_alone(make_rig):
    # A row of one byte: 16 MiB of rows, and 256 MiB of tables.
    rig = make_rig(num_blocks=1 << 20, block_size=16, max_num_tokens=64)
    rig.run(new("A", [1], run=1))
    before = rig.cache.stats()
    rig.begin(new("B", [2], run=2))
    with (
        address_space_left(100 << 20),
        pytest.raises(HostMemoryError, match=rf"'thin': num_blocks={1 << 20} x block_size=16 x 16 bytes of tables: "),
    ):
        rig.save({"thin": torch.zeros(2, dtype=torch.uint8)})
    after = rig.cache.stats()
    assert (after.memory, after.key_row_bytes) == (before.memory, before.key_row_bytes)
    assert after.staging_slots_in_use == 0
    assert_rows(rig.run(new("C", [3], run=1), finish=["B"])["C"], ("C", 0, 1))
    rig.run(new("D", [4], run=2), outputs={"thin": torch.zeros(2, dtype=torch.uint8)})
    assert rig.cache.stats().key_row_bytes["thin"] == 1
