# SPDX-License-Identifier: Apache-2.0
"""The cache itself on `cuda` and `npu`: the oracle judges every delivered row, the machine every call."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from cache_rig import CacheRig, new
from controlled_runtime import ControlledRuntime
from fake_accelerator.backends import VENDORS, Vendor
from fake_accelerator.machine import FakeMachine
from fake_accelerator.torch_patches import torch_on
from row_values import row_values

from omni_core.prefix_cache.config import HIDDEN_KEY
from omni_core.prefix_cache.errors import StepOrderError
from omni_core.testing import WorkloadConfig, run_workload
from omni_core.testing.workload_report import total_rows

NAMES = {Vendor.CUDA: "fake_cuda", Vendor.NPU: "fake_npu"}
CLASSES = {Vendor.CUDA: "RegisteredFakeCuda", Vendor.NPU: "RegisteredFakeNpu"}
SEEDS = range(6)


@pytest.fixture(params=VENDORS, ids=lambda vendor: vendor.value)
def vendor(request: pytest.FixtureRequest, tmp_path, monkeypatch) -> Vendor:
    """A vendor whose fake backend is installed, as pip would install it."""
    vendor = request.param
    info = tmp_path / "fake_accelerator_site-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-accelerator-site\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[omni_core.backends]\n{NAMES[vendor]} = fake_accelerator.registered:{CLASSES[vendor]}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return vendor


@pytest.fixture
def machine(vendor: Vendor) -> Iterator[FakeMachine]:
    machine = vendor.machine()
    with torch_on(machine):
        yield machine
    assert machine.faults == []
    assert machine.pinned == {}, "the backend was not closed"


def workload(vendor: Vendor, machine: FakeMachine, seed: int) -> WorkloadConfig:
    config = WorkloadConfig.draw(seed)
    options = {"device_module": vendor.device_module(machine)}
    return replace(config, stage=replace(config.stage, backend=NAMES[vendor], backend_options=options))


@pytest.mark.parametrize("seed", SEEDS)
def test_every_row_is_right_and_nothing_waited_for_the_device(vendor: Vendor, machine: FakeMachine, seed: int) -> None:
    report = run_workload(seed, workload(vendor, machine, seed))
    assert sum(total_rows([report]).values()) > 100
    assert machine.copies_done > 10
    # A step makes no call that blocks, drains NPU's task queue, asks the driver or goes through pageable memory.
    assert machine.calls == {}


def test_every_row_is_right_behind_an_asynchronous_model(vendor: Vendor, machine: FakeMachine) -> None:
    stream_id = machine.next_stream_id(0)
    machine.make_producer(0, stream_id)
    machine.set_current_stream_id(0, stream_id)
    config = workload(vendor, machine, 3)
    config = replace(config, stage=replace(config.stage, capture_sizes=()))
    report = run_workload(3, config)
    assert sum(total_rows([report]).values()) > 100
    assert machine.calls == {}


def test_pages_and_streams_are_made_at_the_start_only(vendor: Vendor, machine: FakeMachine) -> None:
    pins = []
    for num_requests in (5, 40):
        machine.pins.clear()
        made = machine.streams_made
        run_workload(1, replace(workload(vendor, machine, 1), num_requests=num_requests))
        pins.append((len(machine.pins), machine.streams_made - made))
    assert pins[0] == pins[1]


def test_a_copy_whose_rows_nobody_wants_is_looked_after_by_a_thread_with_a_device(
    vendor: Vendor, machine: FakeMachine
) -> None:
    runtime = ControlledRuntime()
    rig = CacheRig(runtime=runtime, backend=vendor.backend(machine, runtime), staging_depth=1)

    def save() -> None:
        rig.backend.bind_thread()
        rig.save()

    with rig.held():
        rig.begin(new("A", [1, 2, 3], run=12))
        with runtime.stop_at("save_outputs.recorded") as recorded:
            saver = rig.call("saver", save)
            recorded.wait_reached()
            rig.cache.reset()
            recorded.open()
            with pytest.raises(StepOrderError):
                saver.result()
        # The committer has landed nothing yet; without a device it would be told of an error and take that for the end.
        time.sleep(0.05)
        assert rig.cache.stats().staging_slots_in_use == 1
    step = rig.step(new("D", [4]))
    assert torch.equal(rig.take(step, "D")["D"][HIDDEN_KEY], row_values("D", range(4)))
    assert rig.cache.close(20) is True
    rig.backend.close()
