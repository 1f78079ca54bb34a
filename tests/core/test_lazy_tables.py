# SPDX-License-Identifier: Apache-2.0
"""The tables of a large cache take memory by the page: the kernel is never asked for huge pages for them."""

from pathlib import Path

import numpy as np
import pytest

from omni_core.prefix_cache.lazy_tables import KeyTables, zero_table
from omni_core.prefix_cache.slot_table import SlotTable


def flags_of_the_mapping_at(address):
    """The kernel's flags: `hg` huge pages wanted, `nh` declined."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if "-" in first and not first.endswith(":"):
            start, stop = (int(part, 16) for part in first.split("-"))
            inside = start <= address < stop
        elif inside and first == "VmFlags:":
            return set(line.split()[1:])
    raise AssertionError("no mapping holds the table")


def test_huge_pages_are_declined_for_a_new_keys_tables():
    for table in SlotTable(1 << 18, 16).new_key_tables("codes"):
        flags = flags_of_the_mapping_at(table.ctypes.data)
        assert "hg" not in flags
        assert "nh" in flags or not Path("/sys/kernel/mm/transparent_hugepage").exists()


@pytest.mark.parametrize("count", [1, 1000, 1 << 20])
@pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.int32, np.bool_])
def test_a_table_is_zeros_that_can_be_written(count, dtype):
    table = zero_table(count, dtype)
    assert (table.shape, table.dtype) == ((count,), dtype)
    assert not table.any()
    table[-1] = 1
    assert np.count_nonzero(table) == 1


def test_tables_made_beforehand_are_a_keys_own_until_they_are_in_use():
    tables = KeyTables(1000)
    tables.reserve(("codes", "mel"))
    codes = tables.of_new("codes")
    assert all(again is table for again, table in zip(tables.of_new("codes"), codes, strict=True))
    tables.taken("codes")
    others = (*tables.of_new("codes"), *tables.of_new("mel"), *tables.of_new("undeclared"))
    for table in codes:
        table[:] = 1
    assert not any(table.any() for table in others)


def test_tables_reserved_anew_are_those_of_the_newly_named_keys_alone():
    tables = KeyTables(1000)
    tables.reserve(("codes",))
    first = tables.of_new("codes")
    tables.reserve(("mel",))
    assert all(table is not earlier for table, earlier in zip(tables.of_new("codes"), first, strict=True))
