# SPDX-License-Identifier: Apache-2.0
"""What this process may use: the smallest limit of machine and control groups, and what is free of it now."""

from pathlib import Path

import pytest

from omni_core.prefix_cache.host_limit import HostLimit, HostMemory, host_memory

GIB = 1 << 30


def machine(tmp_path, *, total_kib=256 << 20, available_kib=200 << 20, groups="0::/", files=None):
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal:       {total_kib} kB\nMemAvailable:   {available_kib} kB\n")
    (proc / "self" / "cgroup").write_text(groups + "\n")
    for name, content in (files or {}).items():
        path = cgroups / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return host_memory(proc, cgroups)


def test_fault_084_the_containers_limit_counts_not_the_machines(tmp_path):
    host = machine(tmp_path, files={"memory.max": str(16 * GIB)})
    assert host.limit == HostLimit(16 * GIB, str(tmp_path / "cgroup" / "memory.max"))


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
    assert machine(tmp_path, groups=groups, files=files).limit.nbytes == expected_gib * GIB


@pytest.mark.parametrize(
    ("groups", "files", "expected_gib"),
    [
        (
            "0::/a",
            {"a/memory.max": str(16 * GIB), "a/memory.current": str(10 * GIB), "a/memory.stat": f"inactive_file {GIB}"},
            7,
        ),
        ("0::/a", {"a/memory.max": str(16 * GIB), "a/memory.current": str(10 * GIB)}, 6),
        ("0::/a", {"a/memory.max": str(GIB), "a/memory.current": str(GIB + 4096)}, 0),
        ("0::/a", {"a/memory.max": "max", "a/memory.current": str(10 * GIB)}, 200),
        (
            "5:memory:/x",
            {
                "memory/x/memory.limit_in_bytes": str(8 * GIB),
                "memory/x/memory.usage_in_bytes": str(6 * GIB),
                "memory/x/memory.stat": f"inactive_file 1\ntotal_inactive_file {2 * GIB}\n",
            },
            4,
        ),
        ("0::/a", {"a/memory.max": str(16 * GIB)}, 200),
    ],
    ids=["v2", "v2-no-file-pages", "v2-over", "v2-unlimited", "v1", "usage-unknown"],
)
def test_what_a_group_has_free_is_its_limit_less_what_it_uses_and_cannot_drop(tmp_path, groups, files, expected_gib):
    assert machine(tmp_path, groups=groups, files=files).available.nbytes == expected_gib * GIB


def test_the_machine_may_have_less_free_than_the_group(tmp_path):
    files = {"memory.max": str(16 * GIB), "memory.current": "0"}
    host = machine(tmp_path, available_kib=3 << 20, files=files)
    assert host.available == HostLimit(3 * GIB, "the machine's free memory")


def test_a_system_that_tells_nothing_has_no_limit(tmp_path):
    nowhere = tmp_path / "nothing"
    assert host_memory(nowhere, nowhere) == HostMemory(None, None)


def test_this_machine_has_a_limit_and_something_free():
    if Path("/proc/meminfo").exists():
        host = host_memory()
        assert host.limit is not None
        assert host.available is not None
        assert host.limit.nbytes > 0
        assert host.available.nbytes > 0


def test_files_that_are_not_as_the_kernel_writes_them_tell_nothing(tmp_path):
    files = {"memory.max": "²", "x/memory.max": "9" * 5000, "x/memory.stat": "inactive_file ²\nanon"}
    host = machine(tmp_path, groups="no colon\nonly:one\n0::/x\udcff".encode("utf-8", "replace").decode(), files=files)
    assert host.limit == HostLimit(256 * GIB, "the machine's memory")


def test_a_group_whose_name_is_no_text_is_passed_over(tmp_path):
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_bytes(b"0::/\xff\xfe\n")
    assert host_memory(tmp_path / "proc", tmp_path / "cgroup") == HostMemory(None, None)
