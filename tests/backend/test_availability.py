# SPDX-License-Identifier: Apache-2.0
"""The `cuda` and `npu` packages say rightly, and without harm to the process, why a machine cannot run them."""

import os
import re
import sys
import types
import warnings
from importlib.util import find_spec

import omni_core_cuda
import omni_core_npu
import pytest
import torch
from omni_core_cuda import TorchBuild
from omni_core_cuda import reason_for as cuda_reason
from omni_core_npu import reason_for as npu_reason

# --- cuda


def build_of(*, cuda="13.0", hip=None, has_cuda=True, count=lambda: 1):
    return TorchBuild("2.13.0", cuda_version=cuda, hip_version=hip, has_cuda=has_cuda, count_devices=count)


def no_driver():
    warnings.warn("CUDA initialization: Found no NVIDIA driver\n on your system.", UserWarning, stacklevel=2)
    return 0


def broken_driver():
    raise RuntimeError("CUDA unknown error")


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (build_of(cuda=None, has_cuda=False), "built without CUDA"),
        (build_of(cuda=None), "built without CUDA"),
        (build_of(has_cuda=False), "built without CUDA"),
        (build_of(cuda=None, hip="6.4"), "built for ROCm 6.4"),
        (build_of(count=lambda: 0), "sees no device; see `nvidia-smi` and CUDA_VISIBLE_DEVICES"),
        (build_of(count=no_driver), "sees no device: CUDA initialization: Found no NVIDIA driver on your system."),
        (build_of(count=broken_driver), "cannot count devices: RuntimeError: CUDA unknown error"),
    ],
)
def test_cuda_says_what_is_missing(build, says):
    assert says in cuda_reason(build)


@pytest.mark.parametrize("count", [1, 8])
def test_cuda_with_a_device_is_available(count):
    assert cuda_reason(build_of(count=lambda: count)) is None


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is a CUDA build")
def test_cuda_does_not_believe_a_replaced_torch_cuda(monkeypatch):
    # What torch_npu's transfer_to_npu and vLLM's CPU and Ascend workers leave behind.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "Event", object)
    assert "built without CUDA" in omni_core_cuda.CudaBackend.unavailable_reason()


# --- npu


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Makes an importable stand-in for torch_npu from its source; a name of its own, so that nothing real is found."""
    name = "stand_in_for_torch_npu"
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(source):
        (tmp_path / f"{name}.py").write_text(source)
        return name

    yield make
    sys.modules.pop(name, None)


WORKING = """
class npu:
    is_available = staticmethod(lambda: {available})
    device_count = staticmethod(lambda: {devices})
"""


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("raise ImportError('libhccl.so: cannot open shared object file')", r"ImportError: libhccl\.so.*set_env\.sh"),
        ("raise RuntimeError('ERR00007 second accelerator')", r"RuntimeError: ERR00007"),
        ("raise Exception('CANN package check')", r"Exception: CANN package check"),
        ("raise SystemExit('gone')", r"SystemExit: gone"),
        ("import os; os._exit(7)", r"broke a child process, which ended with status 7"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", r"which was killed by signal 11"),
        ("npu = None", r"AttributeError"),
        (WORKING.format(available=False, devices=0), r"sees no NPU; see `npu-smi info`"),
        (WORKING.format(available=True, devices=0), r"sees no NPU"),
    ],
)
def test_npu_says_what_is_wrong_and_this_process_is_not_touched(package, monkeypatch, source, says):
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "1")
    name = package(source)
    loaded_before = set(sys.modules)
    assert re.search(says, npu_reason(name))
    assert set(sys.modules) == loaded_before
    assert os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "1"


def test_npu_with_a_device_is_available_and_still_not_imported_here(package):
    name = package(WORKING.format(available=True, devices=2))
    assert npu_reason(name) is None
    assert name not in sys.modules


def test_npu_child_does_not_load_the_package_through_torch(package):
    name = package("import os\nraise Exception('autoload=' + os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'])")
    assert "autoload=0" in npu_reason(name)


def test_npu_import_that_hangs_is_given_up_with_what_it_started(package):
    # The grandchild would keep a pipe of the probe open for as long as it lives.
    name = package("import subprocess, threading\nsubprocess.Popen(['sleep', '600'])\nthreading.Event().wait()")
    assert "did not end within 0.5 s" in npu_reason(name, probe_timeout_s=0.5)


def test_npu_already_loaded_in_this_process_is_asked_here(monkeypatch):
    loaded = types.ModuleType("loaded_npu")
    loaded.npu = types.SimpleNamespace(is_available=lambda: True, device_count=lambda: 1)
    monkeypatch.setitem(sys.modules, "loaded_npu", loaded)
    assert npu_reason("loaded_npu") is None
    loaded.npu.is_available = lambda: False
    assert "sees no NPU" in npu_reason("loaded_npu")
    del loaded.npu
    assert "is loaded but cannot count devices: AttributeError" in npu_reason("loaded_npu")


def test_npu_not_installed_says_what_to_install():
    assert "is not installed; install CANN and the torch-npu release" in npu_reason("no_such_torch_npu")


@pytest.mark.skipif(find_spec("torch_npu") is not None, reason="torch_npu is installed here")
def test_the_npu_backend_asks_for_torch_npu():
    assert "the package torch_npu is not installed" in omni_core_npu.NpuBackend.unavailable_reason()
