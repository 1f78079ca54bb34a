# SPDX-License-Identifier: Apache-2.0
"""What only Ascend does: a host task queue, events that are complete before they exist, an import that changes much."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fake_accelerator.backends import Vendor
from fake_accelerator.fake_torch_npu import OlderNpuModule
from fake_accelerator.rig import SHORT_S, WAIT_S, FakeRig, step_rows

from omni_core.backend import DeviceWaitTimeoutError
from omni_core.backend.host_pages import PAGE_BYTES

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture
def npu(make_rig) -> FakeRig:
    return make_rig(Vendor.NPU)


def test_nothing_waits_for_the_host_task_queue(npu: FakeRig) -> None:
    rows = step_rows(1)
    ring = npu.backend.snapshot_ring(1, 4096, torch.device("cpu"))
    with npu.machine.hold_tasks():
        clone = npu.backend.snapshot(rows, ring.slot(0))
        destination, done = npu.copy(clone)
        recorded = npu.stream.record()
        npu.stream.wait(npu.backend.current_stream().record())
        assert not done.query()
        assert not recorded.query()
        assert bool((destination == -1).all())
        with pytest.raises(DeviceWaitTimeoutError):
            done.synchronize(SHORT_S)
        assert not done.query()
    done.synchronize(WAIT_S)
    assert torch.equal(destination, rows)
    assert npu.machine.calls == {}


def test_an_event_is_not_complete_before_its_record_was_launched(npu: FakeRig) -> None:
    # One that was never recorded says that it is, and its wait orders nothing.
    assert npu.module.Event().query()
    with npu.machine.hold_tasks():
        assert not npu.stream.record().query()


def test_closing_is_bounded_while_the_host_task_queue_is_stuck(make_rig) -> None:
    npu = make_rig(Vendor.NPU, close_timeout_s=0.02)
    with npu.machine.hold_tasks():
        npu.copy(step_rows(1))
        with pytest.raises(DeviceWaitTimeoutError, match="close_timeout_s"):
            npu.backend.close()
    npu.machine.wait_until(lambda: npu.machine.copies_done == 1)
    assert npu.machine.calls == {}


def test_telling_streams_apart_does_not_drain_the_task_queue(npu: FakeRig) -> None:
    with npu.machine.hold_tasks():
        stream = npu.backend.current_stream()
        assert npu.backend.current_stream() is stream
    assert npu.machine.calls == {}


def test_device_info_names_driver_cann_and_torch_npu_as_far_as_they_are_told(npu: FakeRig) -> None:
    assert npu.backend.device_info().software == {"driver": "25.5.0", "CANN": "9.1.0"}

    def broken(module="CANN"):
        raise Exception("no version.cfg")

    npu.module.utils.get_cann_version = broken
    assert npu.backend.device_info().software == {}


# --- the import of torch_npu

STAND_IN = """
import os
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
import torch
from fake_accelerator.backends import Vendor
from fake_accelerator.fake_torch_npu import OlderNpuModule
from fake_accelerator.fake_torch_npu import NpuModule
machine = Vendor.NPU.machine()
npu = NpuModule(machine)
torch.utils.rename_privateuse1_backend("npu")
torch._register_device_module("npu", npu)
"""

PROGRAM = """
import os, sys
import omni_core_npu
from omni_core.runtime import ThreadingRuntime

for before in (None, "1"):
    os.environ.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
    if before is not None:
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = before
    child = os.fork()
    if child == 0:
        assert "torch_npu" not in sys.modules
        module = omni_core_npu.native_module()
        import torch_npu
        assert module is torch_npu.npu, module
        backend = omni_core_npu.NpuBackend(ThreadingRuntime())
        info = backend.device_info()
        backend.close()
        print(os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD"), info.name, info.device, flush=True)
        sys.exit()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def test_torch_npu_is_imported_when_it_is_needed_and_the_autoload_setting_stays(tmp_path) -> None:
    (tmp_path / "torch_npu.py").write_text(STAND_IN)
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PROGRAM],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(SUPPORT), *sys.path])},
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["None Ascend910B4 npu:0", "1 Ascend910B4 npu:0"]


def test_a_build_whose_npurt_raises_pins_as_one_without_it(make_rig) -> None:
    """torch_npu 2.14 built without `_npurt` has the function, and says only when called that nothing is behind."""

    class WithoutRuntimeApi(OlderNpuModule):
        def npurt(self):
            raise RuntimeError("torch_npu._C._npurt is unavailable in this build.")

    machine = make_rig(Vendor.OLDER_NPU).machine
    backend = Vendor.OLDER_NPU.backend(machine, device_module=WithoutRuntimeApi(machine))
    assert not backend.capabilities.exact_pinning
    assert backend.pinned_arena(5 * PAGE_BYTES).pinned_bytes == 8 * PAGE_BYTES
    backend.close()
