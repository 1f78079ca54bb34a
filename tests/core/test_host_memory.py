# SPDX-License-Identifier: Apache-2.0
"""What a cache will cost is known, and checked against the machine and the container, before anything is allocated."""

import logging
from pathlib import Path

import pytest
import torch

from omni_core.prefix_cache.config import PrefixCacheConfig
from omni_core.prefix_cache.errors import HostMemoryError
from omni_core.prefix_cache.host_memory import HostLimit, check_host_memory, host_limit, plan_memory

GIB = 1 << 30


def config(**settings):
    settings = {"num_blocks": 1000, "block_size": 16, "hidden_size": 2048, "max_num_tokens": 8192} | settings
    return PrefixCacheConfig(hidden_dtype=torch.bfloat16, **settings)


def machine(tmp_path, *, total_kib=256 << 20, groups="0::/", files=None):
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal:       {total_kib} kB\nMemFree:        1 kB\n")
    (proc / "self" / "cgroup").write_text(groups + "\n")
    for name, content in (files or {}).items():
        path = cgroups / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return host_limit(proc, cgroups)


def test_the_figures_of_the_design_text_come_out():
    thinker = plan_memory(config(num_blocks=15_092), {"hidden": 2048 * 2})
    talker = plan_memory(config(num_blocks=16_180), {"codes.audio": 16 * 8})
    assert thinker.pool_bytes == {"hidden": 989_069_312}
    assert talker.pool_bytes == {"codes.audio": 33_136_640}


def test_fault_082_every_cache_of_the_host_is_counted():
    one, eight = (plan_memory(config(caches_per_host=count), {"hidden": 4096}) for count in (1, 8))
    assert eight.pinned_on_host_bytes == 8 * one.pinned_on_host_bytes
    assert eight.most_on_host_bytes == 8 * one.most_on_host_bytes


def test_fault_082_pinned_pages_of_all_caches_together_must_fit(caplog):
    limit = HostLimit(GIB, "the machine's memory")
    check_host_memory(config(caches_per_host=1), limit)
    with pytest.raises(HostMemoryError, match=r"each of 8 caches on this host.*staging_depth=4 or max_num_tokens=8192"):
        check_host_memory(config(caches_per_host=8), limit)


def test_a_pool_that_may_outgrow_the_limit_is_a_warning_with_numbers(caplog):
    with caplog.at_level(logging.INFO, logger="omni_core"):
        check_host_memory(config(num_blocks=100_000), HostLimit(4 * GIB, "a file"))
        check_host_memory(config(num_blocks=100), HostLimit(4 * GIB, "a file"))
    warning, info = caplog.records
    assert (warning.levelname, info.levelname) == ("WARNING", "INFO")
    assert "num_blocks=100000 x block_size=16 x 4096 bytes" in warning.message
    assert "Give the engine fewer blocks" in warning.message


def test_nothing_is_checked_where_nothing_is_known():
    assert check_host_memory(config(), None).caches_per_host == 1


def test_fault_084_the_containers_limit_counts_not_the_machines(tmp_path):
    limit = machine(tmp_path, files={"memory.max": str(16 * GIB)})
    assert limit == HostLimit(16 * GIB, str(tmp_path / "cgroup" / "memory.max"))


@pytest.mark.parametrize(
    ("groups", "files", "expected_gib"),
    [
        ("0::/a/b", {"a/b/memory.max": "max", "a/memory.max": str(8 * GIB), "memory.max": "max"}, 8),
        ("0::/a/b", {"a/b/memory.max": str(2 * GIB), "a/memory.max": str(8 * GIB)}, 2),
        ("3:cpu:/x\n5:memory,hugetlb:/x", {"memory/x/memory.limit_in_bytes": str(4 * GIB)}, 4),
        ("5:memory:/x", {"memory/x/memory.limit_in_bytes": str((1 << 63) - 4096)}, 256),
        ("0::/", {}, 256),
    ],
    ids=["v2-parent", "v2-own", "v1", "v1-unlimited", "none"],
)
def test_the_smallest_limit_of_machine_and_control_groups_counts(tmp_path, groups, files, expected_gib):
    assert machine(tmp_path, groups=groups, files=files).nbytes == expected_gib * GIB


def test_a_system_that_tells_nothing_has_no_limit(tmp_path):
    assert host_limit(tmp_path / "nothing", tmp_path / "nothing") is None


def test_this_machine_has_a_limit():
    if Path("/proc/meminfo").exists():
        assert host_limit().nbytes > 0
