# SPDX-License-Identifier: Apache-2.0
"""The suite is worth something only if a broken backend fails it: each mistake fails exactly the checks it should."""

from __future__ import annotations

import re
import threading
import unittest
from typing import ClassVar

import pytest
import render_conformance
from broken_backends import BROKEN, RefusedMemoryIsNotExplained
from omni_core_cpu_sim import CpuSimBackend

from omni_core.backend import DeviceBackend
from omni_core.backend.conformance import (
    CONFORMANCE_CHECKS,
    BackendConformance,
    BackendProperty,
    ConformanceCheck,
    measure_throughput,
    run_conformance,
)
from omni_core.backend.conformance.rig import Rig
from omni_core.runtime import ThreadingRuntime


def check_named(name: str) -> ConformanceCheck:
    return next(check for check in CONFORMANCE_CHECKS if check.name == name)


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_a_broken_promise_fails_exactly_its_checks(broken: type[CpuSimBackend]) -> None:
    failed = {result.check.name: result.error for result in run_conformance(broken) if not result.passed}
    assert failed.keys() == BROKEN[broken].keys(), failed
    for name, explanation in BROKEN[broken].items():
        assert re.search(explanation, str(failed[name])), failed[name]
        assert check_named(name).requirement in "".join(failed[name].__notes__)


def test_every_check_is_failed_by_a_broken_backend() -> None:
    caught = {name for expected in BROKEN.values() for name in expected}
    assert caught == {check.name for check in CONFORMANCE_CHECKS}


def test_a_broken_backend_breaks_one_property() -> None:
    for broken, expected in BROKEN.items():
        assert len({check_named(name).property for name in expected}) == 1, broken.__name__


def test_every_property_is_tried() -> None:
    assert {check.property for check in CONFORMANCE_CHECKS} == set(BackendProperty)


def test_the_page_shows_the_checks_and_the_backends_they_catch() -> None:
    page = render_conformance.PAGE.read_text(encoding="utf-8")
    assert render_conformance.rendered(page) == page, render_conformance.HOW_TO


def test_a_check_that_was_changed_on_the_page_is_noticed() -> None:
    page = render_conformance.PAGE.read_text(encoding="utf-8")
    stale = page.replace("`events_stay_complete`", "`another`", 1)
    assert stale != page
    assert render_conformance.rendered(stale) == page


def test_a_report_has_one_line_per_check_and_goes_on_after_a_failure() -> None:
    names = ("describes_itself", "refused_memory_is_explained", "rows_arrive_unchanged")
    results = run_conformance(RefusedMemoryIsNotExplained, [check_named(name) for name in names])
    assert [(result.check.name, result.passed) for result in results] == [
        ("describes_itself", True),
        ("refused_memory_is_explained", False),
        ("rows_arrive_unchanged", True),
    ]
    assert "must name the size" in str(results[1].error)


def test_every_check_states_its_requirement_under_a_name_of_its_own() -> None:
    assert len({check.name for check in CONFORMANCE_CHECKS}) == len(CONFORMANCE_CHECKS)
    for check in CONFORMANCE_CHECKS:
        assert check.requirement.endswith("."), check.name


def test_a_check_that_hangs_is_a_failed_check() -> None:
    let_go = threading.Event()

    def hang(rig: Rig) -> None:
        let_go.wait(30)

    hanging = ConformanceCheck("hangs", BackendProperty.CLOSING, "It ends.", hang)
    with pytest.raises(AssertionError, match=r"hangs: did not end within 0\.05 s"):
        hanging.run(CpuSimBackend, limit_s=0.05)
    let_go.set()


def test_a_backend_that_cannot_be_made_is_reported_not_raised() -> None:
    def refuse(runtime: ThreadingRuntime) -> DeviceBackend:
        raise RuntimeError("no such device")

    results = run_conformance(refuse)
    assert len(results) == len(CONFORMANCE_CHECKS)
    assert all("no such device" in str(result.error) for result in results)


def test_a_machine_without_the_device_skips() -> None:
    class Absent(BackendConformance):
        backend_name = "absent"

        def skip_reason(self) -> str | None:
            return "no such device here"

    with pytest.raises(unittest.SkipTest, match="no such device here"):
        Absent().test_conformance(CONFORMANCE_CHECKS[0])


def test_throughput_is_a_figure_for_each_kind_of_memory() -> None:
    measured = measure_throughput(CpuSimBackend, nbytes=1 << 20, rounds=2)
    assert measured.nbytes == 1 << 20
    assert measured.pinned_bytes_per_s > 0
    assert measured.pageable_bytes_per_s > 0


def test_throughput_is_that_of_the_backends_copies() -> None:
    # 1 MiB at 20 MB/s takes 52 ms and more, however fast the machine is; the way past the backend does not.
    measured = measure_throughput(
        lambda runtime: CpuSimBackend(runtime, copy_bandwidth_bytes_per_s=20e6), nbytes=1 << 20, rounds=2
    )
    assert measured.pinned_bytes_per_s <= 20e6


def test_a_throughput_of_wrong_bytes_is_no_figure() -> None:
    class Forgetful(CpuSimBackend):
        def copy_to_host(self, destination, source, stream):
            return stream.record()

    with pytest.raises(AssertionError, match="bytes of the pinned copies"):
        measure_throughput(Forgetful, nbytes=1 << 20, rounds=1)


def test_a_subclass_states_its_facts() -> None:
    class Facts(BackendConformance):
        backend_name = "cpu_sim"
        backend_options: ClassVar = {"max_pinned_bytes": 100}

    backend = Facts().make_backend(ThreadingRuntime())
    with pytest.raises(MemoryError, match="max_pinned_bytes=100"):
        backend.pinned_arena(101)
    backend.close()
