# SPDX-License-Identifier: Apache-2.0
"""What a cache will cost is known, and checked against the machine and the container, before anything is allocated."""

import logging
from dataclasses import replace

import pytest
import torch

from omni_core.prefix_cache.block_pool import RowSpec
from omni_core.prefix_cache.config import HIDDEN_KEY, PrefixCacheConfig
from omni_core.prefix_cache.errors import HostMemoryError
from omni_core.prefix_cache.host_limit import HostLimit, HostMemory
from omni_core.prefix_cache.host_memory import check_host_memory, check_staging_memory, judge_fit
from omni_core.prefix_cache.sizing import StageSizes, plan_cache

GIB = 1 << 30
MIB = 1 << 20
KIB = 1 << 10


def config(**settings):
    settings = {"num_blocks": 1000, "block_size": 16, "hidden_size": 2048, "max_num_tokens": 8192} | settings
    return PrefixCacheConfig(hidden_dtype=torch.bfloat16, **settings)


def sizes(**settings):
    return StageSizes(config(**settings))


def host(limit_bytes, *, available_bytes=None, source="the machine's memory"):
    available = None if available_bytes is None else HostLimit(available_bytes, "what is free")
    return HostMemory(HostLimit(limit_bytes, source), available)


# -- the plan


def test_the_figures_of_the_design_text_come_out():
    thinker = plan_cache(config(num_blocks=15_092), {"hidden": 2048 * 2})
    talker = plan_cache(config(num_blocks=16_180), {"codes.audio": 16 * 8})
    assert thinker.pool_bytes == {"hidden": 989_069_312}
    assert talker.pool_bytes == {"codes.audio": 33_136_640}


def test_what_is_committed_at_start_and_what_it_can_come_to_are_two_figures():
    plan = replace(sizes(), row_bytes={"codes": 128}, sink_queue_bytes=7, sink_bytes=11).plan()
    staging_bytes = 4 * (8192 * (4096 + 256) + MIB)
    rows_bytes = 16_000 * (4096 + 128)
    table_bytes = plan.cache.table_bytes
    assert plan.start_bytes == plan.cache.pinned_bytes == staging_bytes
    assert plan.cache.device_bytes == staging_bytes
    assert plan.most_bytes == staging_bytes + rows_bytes + table_bytes + 512 * MIB + 7 + 11


def test_on_a_cpu_the_rings_are_host_memory_too():
    on_cpu = replace(sizes(), device_is_host=True, row_bytes={"late": 64}, deferred_keys=("late",)).plan()
    assert on_cpu.start_bytes == on_cpu.cache.pinned_bytes + on_cpu.cache.device_bytes
    assert on_cpu.cache.deferred_ring_bytes == 64 * MIB
    assert on_cpu.cache.bounce_bytes == 2 * (8192 * 256 + MIB)


def test_a_captured_layer_is_a_key_and_room_in_staging():
    without, with_two = (replace(sizes(), layer_keys=names).plan() for names in ((), ("layer_1", "layer_9")))
    assert set(with_two.cache.pool_bytes) == {HIDDEN_KEY, "layer_1", "layer_9"}
    assert with_two.cache.pool_bytes["layer_9"] == 16_000 * 4096
    assert with_two.start_bytes - without.start_bytes == 2 * 4 * 8192 * 4096


def test_a_stage_that_keeps_no_hidden_rows_pays_for_none():
    plan = replace(sizes(), keeps_hidden=False, row_bytes={"codes": 128}).plan()
    assert plan.cache.pool_bytes == {"codes": 16_000 * 128}


def test_pretouch_moves_known_rows_from_later_to_the_start():
    late, early = (
        replace(
            sizes(pretouch=pretouch, key_rows={"codes": RowSpec((16,), torch.int64)}),
            row_bytes={"codes": 128, "unknown": 8},
        ).plan()
        for pretouch in (False, True)
    )
    assert early.start_bytes - late.start_bytes == 16_000 * (4096 + 128)
    assert early.most_bytes == late.most_bytes


@pytest.mark.parametrize(("row_bytes", "missing"), [(256, 0), (384, 0), (385, 1), (400, 16), (4096, 3712)])
def test_rows_that_staging_has_no_room_for_are_told_with_what_is_missing(row_bytes, missing):
    # 256 bytes a token and 1 MiB a step: 384 for each of 8192 tokens
    assert replace(sizes(), row_bytes={"codes": row_bytes}).missing_row_bytes == missing


def test_fault_082_every_cache_of_the_host_is_counted():
    one, eight = (sizes(caches_per_host=count).plan() for count in (1, 8))
    assert eight.start_on_host_bytes == 8 * one.start_on_host_bytes
    assert eight.most_on_host_bytes == 8 * one.most_on_host_bytes


# -- against a host


def test_fault_082_pinned_pages_of_all_caches_together_must_fit():
    check_host_memory(sizes(caches_per_host=1), host(GIB))
    with pytest.raises(HostMemoryError, match=r"each of 8 caches on this host.*staging_depth=4, max_num_tokens=8192"):
        check_host_memory(sizes(caches_per_host=8), host(GIB))


def test_what_is_free_now_must_hold_what_one_cache_commits_at_start():
    check_host_memory(sizes(), host(64 * GIB, available_bytes=GIB))
    with pytest.raises(HostMemoryError, match=r"before the first step of this cache, but 104857600 are free now"):
        check_host_memory(sizes(), host(64 * GIB, available_bytes=100 * MIB))


def test_before_any_start_what_is_free_now_must_hold_all_caches():
    sizes = StageSizes(config(caches_per_host=4), {})
    all_bytes = sizes.plan().start_on_host_bytes
    for before, refused in ((False, False), (True, True)):
        host = HostMemory(None, HostLimit(all_bytes - 1, "the machine"), before_any_start=before)
        assert (judge_fit(sizes, host).refusal is not None) is refused
    told = judge_fit(sizes, host).refusal
    assert "for each of 4 caches on this host" in told
    assert f"but {all_bytes - 1} are free now" in told
    enough = HostMemory(None, HostLimit(all_bytes, "the machine"), before_any_start=True)
    assert judge_fit(sizes, enough).refusal is None


def test_a_pretouched_pool_that_cannot_fit_is_refused_and_the_setting_named():
    small = host(2 * GIB)
    check_host_memory(sizes(num_blocks=50_000), small)
    with pytest.raises(HostMemoryError, match=r"pretouch=True.*num_blocks 50000 → \d+"):
        check_host_memory(sizes(num_blocks=50_000, pretouch=True), small)


def test_a_pool_that_may_outgrow_the_limit_is_a_warning_with_numbers(caplog):
    with caplog.at_level(logging.INFO, logger="omni_core"):
        check_host_memory(sizes(num_blocks=100_000), host(4 * GIB, source="a file"))
        check_host_memory(sizes(num_blocks=100), host(4 * GIB, source="a file"))
    warning, info = caplog.records
    assert (warning.levelname, info.levelname) == ("WARNING", "INFO")
    assert "a file allows 4294967296" in warning.message
    assert "num_blocks=100000 x block_size=16 x 4096 bytes" in warning.message
    assert "num_blocks 100000 → " in warning.message


def test_a_pool_larger_than_what_is_free_now_is_a_warning(caplog):
    with caplog.at_level(logging.WARNING, logger="omni_core"):
        check_host_memory(sizes(num_blocks=100_000), host(64 * GIB, available_bytes=4 * GIB))
    assert "4294967296 are free now (what is free)" in caplog.text


def test_further_keys_that_are_known_are_part_of_the_check():
    known = replace(sizes(num_blocks=20_000), row_bytes={"wide": 65_536}, layer_keys=("layer_3",))
    fit = judge_fit(known, host(20 * GIB))
    assert not fit.fits
    assert fit.plan.most_bytes > 20_000 * 16 * (65_536 + 2 * 4096)


def test_what_the_policy_adds_is_checked_beside_what_is_there_already():
    deferred = replace(sizes(device_staging_bytes=GIB, extra_step_bytes=GIB), deferred_keys=("mel",))
    staging_bytes, bounce_bytes = deferred.plan().cache.staging_bytes, deferred.plan().cache.bounce_bytes
    assert bounce_bytes > GIB
    check_host_memory(deferred, host(16 * GIB, available_bytes=bounce_bytes), taken_bytes=staging_bytes)
    with pytest.raises(
        HostMemoryError,
        match=rf"{staging_bytes + bounce_bytes} bytes are needed .* are free now .*, with the {staging_bytes} "
        rf"that this cache has already\).*device_staging_bytes={GIB} for the deferred keys mel\..*"
        rf"device_staging_bytes {GIB} →",
    ):
        check_host_memory(deferred, host(16 * GIB, available_bytes=bounce_bytes - 1), taken_bytes=staging_bytes)
    with pytest.raises(HostMemoryError, match="but the machine's memory allows 4294967296"):
        check_host_memory(deferred, host(4 * GIB), taken_bytes=staging_bytes)
    on_cpu = replace(deferred, device_is_host=True)
    taken_bytes = on_cpu.before_policy.plan().start_bytes
    assert taken_bytes == 2 * staging_bytes
    room_bytes = bounce_bytes + GIB
    check_host_memory(on_cpu, host(64 * GIB, available_bytes=room_bytes), taken_bytes=taken_bytes)
    with pytest.raises(HostMemoryError, match=rf"{taken_bytes + room_bytes} bytes are needed"):
        check_host_memory(on_cpu, host(64 * GIB, available_bytes=room_bytes - 1), taken_bytes=taken_bytes)


def test_before_the_policy_is_known_only_staging_is_checked(caplog):
    stage = replace(sizes(num_blocks=1 << 30, pretouch=True), deferred_keys=("mel",))
    with caplog.at_level(logging.INFO, logger="omni_core"):
        check_staging_memory(stage, host(GIB))
    assert caplog.records == [], "whether rows fit is said once, when it is known which"
    with pytest.raises(HostMemoryError, match=r"before the first step.*staging_depth 4 → 2"):
        check_staging_memory(stage, host(100 * MIB))


def test_nothing_is_checked_where_nothing_is_known():
    assert judge_fit(sizes(num_blocks=1 << 30), HostMemory(None, None)).fits


def test_what_other_stages_take_counts_against_the_limit_and_is_told():
    alone = replace(sizes(num_blocks=10_000), sink_bytes=GIB)
    beside = replace(alone, beside_bytes=3 * GIB)
    assert beside.plan().most_on_host_bytes == alone.plan().most_on_host_bytes + 3 * GIB
    assert beside.plan().start_on_host_bytes == alone.plan().start_on_host_bytes + 3 * GIB
    assert beside.plan().most_bytes == alone.plan().most_bytes
    assert judge_fit(alone, host(4 * GIB)).fits
    assert "caches on this host, and 3221225472 of other stages), but" in judge_fit(beside, host(4 * GIB)).warning
    assert judge_fit(beside, host(64 * GIB, available_bytes=4 * GIB)).fits, "what runs is not free now anyway"


# -- what to change


def test_a_refusal_also_tells_what_lets_it_start():
    known = replace(sizes(num_blocks=50_000, pretouch=True), sink_bytes=4 * GIB)
    fit = judge_fit(known, host(2 * GIB))
    found = {remedy.setting: remedy.value for remedy in fit.start_remedies}
    assert found["pretouch"] == 0
    assert "pretouch" not in {remedy.setting for remedy in fit.remedies}
    for remedy in fit.start_remedies:
        assert judge_fit(changed(known, remedy.setting, remedy.value), host(2 * GIB)).refusal is None, remedy
    with pytest.raises(HostMemoryError, match=r"Any of these lets it start: .*pretouch 1 → 0"):
        check_host_memory(known, host(2 * GIB))


def test_what_lets_it_start_is_not_told_twice():
    fit = judge_fit(sizes(staging_depth=64), host(2 * GIB))
    assert fit.refusal is not None
    assert fit.remedies
    assert not set(fit.remedies) & set(fit.start_remedies)


PAIRS = {
    "sink and recycled": (replace(sizes(max_recycled_bytes=8 * GIB), sink_bytes=8 * GIB), host(4 * GIB)),
    "blocks and sink": (replace(sizes(num_blocks=100_000), sink_bytes=8 * GIB), host(4 * GIB)),
    "queue and layers": (
        replace(
            sizes(num_blocks=15_000),
            sink_queue_bytes=16 * GIB,
            layer_keys=tuple(f"layer_{number}" for number in range(24)),
        ),
        host(8 * GIB),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_where_one_setting_is_not_enough_two_are_named_that_are(name):
    stage, room = PAIRS[name]
    fit = judge_fit(stage, room)
    assert fit.remedies == ()
    one, other = fit.pair
    assert judge_fit(changed(changed(stage, one.setting, one.value), other.setting, other.value), room).fits
    for first, second in ((one, other), (other, one)):
        one_more = changed(changed(stage, first.setting, first.value), second.setting, second.value + 1)
        assert not judge_fit(one_more, room).fits, second


STAGES = {
    "pool": sizes(num_blocks=2_000_000),
    "staging": sizes(staging_depth=64),
    "caches": sizes(caches_per_host=16, num_blocks=4000),
    "layers": replace(sizes(num_blocks=15_092), layer_keys=tuple(f"layer_{number}" for number in range(24))),
    "sink": replace(sizes(), sink_bytes=64 * GIB),
    "queue": replace(sizes(), sink_queue_bytes=64 * GIB),
    "recycled": sizes(max_recycled_bytes=64 * GIB),
    "pretouch": sizes(num_blocks=20_000, pretouch=True, staging_depth=28),
}
CHANGES = {
    "layers": lambda stage, value: replace(stage, layer_keys=stage.layer_keys[:value]),
    "sink_bytes": lambda stage, value: replace(stage, sink_bytes=value),
    "sink_queue_bytes": lambda stage, value: replace(stage, sink_queue_bytes=value),
}


def changed(stage, setting, value):
    if setting in CHANGES:
        return CHANGES[setting](stage, value)
    kind = type(getattr(stage.config, setting))
    return replace(stage, config=replace(stage.config, **{setting: kind(value)}))


@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize("room", [host(8 * GIB), host(64 * GIB, available_bytes=6 * GIB)], ids=["limit", "free"])
def test_each_remedy_alone_makes_it_fit_and_one_more_does_not(name, room):
    stage = STAGES[name]
    fit = judge_fit(stage, room)
    if fit.fits:
        assert fit.remedies == ()
        return
    assert fit.remedies
    for remedy in fit.remedies:
        assert judge_fit(changed(stage, remedy.setting, remedy.value), room).fits, remedy
        one_more = changed(stage, remedy.setting, remedy.value + 1)
        assert one_more == stage or not judge_fit(one_more, room).fits, remedy


def test_what_no_single_setting_can_mend_says_so():
    fit = judge_fit(sizes(num_blocks=2_000_000, caches_per_host=2), host(100 * MIB))
    assert fit.remedies == fit.pair == ()
    with pytest.raises(HostMemoryError, match="No single setting makes it fit"):
        check_host_memory(sizes(num_blocks=2_000_000, caches_per_host=2), host(100 * MIB))
