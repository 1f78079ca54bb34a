# SPDX-License-Identifier: Apache-2.0
"""Faults 1d and 1e: content that is not what it was, and memory known before it is needed."""

import torch
from cache_rig import new
from row_values import assert_rows

from omni_core.prefix_cache.config import HIDDEN_KEY
from omni_core.prefix_cache.errors import HitRowsAbsentError
from omni_core.prefix_cache.gate import GateStatus, StageFacts, stage_prefix_cache_config


def test_fault_074_after_a_reset_nothing_old_is_served_and_the_report_says_what_went(make_rig):
    rig = make_rig(keys={"codes": ((4,), torch.int64)})
    rig.run(new("A", [1, 2], run=6))
    rig.step(new("B", [3]))
    report = rig.cache.reset()
    assert report.rows_cleared == {HIDDEN_KEY: 10, "codes": 10}
    assert report.requests_forgotten == 2
    assert report.steps_dropped == 1
    taken = rig.run(new("C", [1, 4], hit=4), new("D", [5]))
    assert isinstance(taken.failed["C"], HitRowsAbsentError)
    assert_rows(taken["D"], ("D", 0, 4))


def test_fault_077_a_hit_on_blocks_no_local_step_wrote_is_typed_not_served(rig):
    taken = rig.run(new("A", [1, 2, 3], hit=8), new("B", [4]))
    assert isinstance(taken.failed["A"], HitRowsAbsentError)
    assert "'A'" in str(taken.failed["A"])
    assert "[(0, 8)]" in str(taken.failed["A"])
    assert_rows(taken["B"], ("B", 0, 4))


def test_fault_077_a_stage_that_receives_kv_gets_no_cache():
    for role in ("kv_consumer", "kv_both"):
        decision = stage_prefix_cache_config(StageFacts(enabled=True, kv_role=role))
        assert decision.status is GateStatus.REFUSED
        assert role in decision.reason
    for connector, status in {"NixlConnector": GateStatus.REFUSED, "MooncakeConnector": GateStatus.SUPPORTED}.items():
        producer = StageFacts(enabled=True, kv_role="kv_producer", kv_connector=connector)
        assert stage_prefix_cache_config(producer).status is status


def test_fault_081_memory_is_planned_beforehand_and_pinned_before_the_first_step(make_rig):
    rig = make_rig(staging_depth=3, hidden=8, backend_options={"report_arenas_as_pinned": True})
    planned_bytes = 3 * rig.config.staging_arena_bytes
    assert rig.cache.stats().pinned_bytes == rig.backend.pinned_bytes == planned_bytes
    assert rig.cache.stats().device_bytes == rig.backend.device_bytes == planned_bytes
    assert rig.config.pool_bytes(rig.config.hidden_row_bytes) == 16 * 4 * 8 * 4
    before = (rig.backend.pinned_allocations, rig.backend.device_allocations)
    rig.run(new("A", [1]), keys=())
    rig.run(new("B", [2]), outputs={"late": torch.arange(8.0).view(4, 2)})
    assert (rig.backend.pinned_allocations, rig.backend.device_allocations) == before
    assert rig.cache.stats().pinned_bytes == planned_bytes
    assert rig.cache.stats().pool_reserved_bytes == rig.config.pool_bytes(32) + rig.config.pool_bytes(8)
