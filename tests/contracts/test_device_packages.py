# SPDX-License-Identifier: Apache-2.0
"""What the CUDA and NPU backends use of torch and torch_npu is there, under its name and with its parameters.

torch_npu's wheel is downloaded and read, never imported: it needs CANN. Of torch the installed one is read.
"""

import importlib.util
import inspect
from pathlib import Path

import pytest
from contract_report import ContractReport, attributes_read, source_report
from device_contract import TORCH_CUDA, TORCH_NPU, TORCH_NPU_BINARY_NAMES, TORCH_NPU_LIBRARY, names_lacking
from fake_accelerator import fake_torch_cuda, fake_torch_npu
from vendor_wheels import unpacked_wheel

from omni_core.backend.accelerator import DeviceModule, NativeEvent, NativeStream
from omni_core.integrations.vllm.releases.engine_contract import takes
from omni_core.integrations.vllm.releases.engine_sources import EngineSources

ROOT = Path(__file__).parents[2]
TORCH_NPU_WHEEL = "torch_npu==2.14.0"
NPU_BACKEND = ROOT / "backends" / "npu"
CUDA_BACKEND = ROOT / "backends" / "cuda"
MODULES_OF_OURS = {"utils"}
"""Read as a module on the way to what is in it."""


@pytest.fixture(scope="module")
def torch_npu():
    return unpacked_wheel(TORCH_NPU_WHEEL) / "torch_npu"


def installed_torch():
    return Path(importlib.util.find_spec("torch").submodule_search_locations[0])


def members_of(*protocols):
    """What the shared part of the backends uses of a vendor's module, streams and events."""
    return {
        name
        for protocol in protocols
        for name in (*protocol.__annotations__, *vars(protocol))
        if not name.startswith("_")
    }


def names_of(facts):
    return {fact.name for fact in facts} | {word for fact in facts for word in fact.detail}


def test_the_installed_torch_has_what_the_cuda_backend_uses(show):
    report = source_report("the installed torch", installed_torch(), TORCH_CUDA)
    show(report)
    assert report.missing == ()


@pytest.mark.packaging
def test_the_wheel_of_torch_npu_has_what_the_npu_backend_uses(torch_npu, show):
    in_sources = source_report(TORCH_NPU_WHEEL, torch_npu, TORCH_NPU)
    in_library = names_lacking(torch_npu / TORCH_NPU_LIBRARY, TORCH_NPU_BINARY_NAMES)
    report = ContractReport(
        TORCH_NPU_WHEEL,
        in_sources.num_checked + len(TORCH_NPU_BINARY_NAMES),
        (*in_sources.missing, *(f"{TORCH_NPU_LIBRARY}: {name}" for name in in_library)),
    )
    show(report)
    assert report.missing == ()


@pytest.mark.packaging
def test_a_name_that_the_library_lacks_is_noticed(torch_npu):
    names = ("npuHostRegister", "npuHostRegisterNothing", "puHostRegister")
    assert names_lacking(torch_npu / TORCH_NPU_LIBRARY, names) == names[1:]


def test_everything_the_npu_backend_asks_torch_npu_for_is_in_the_contract():
    asked = attributes_read(NPU_BACKEND, "npu", "npu.utils", "npurt", "module.npu", "torch.npu")
    used = asked | members_of(DeviceModule, NativeEvent, NativeStream)
    assert asked >= {"npurt", "npuHostRegister", "get_cann_version"}
    assert used - MODULES_OF_OURS - names_of(TORCH_NPU) - set(TORCH_NPU_BINARY_NAMES) == set()


def test_everything_the_cuda_backend_asks_torch_for_is_in_the_contract():
    asked = attributes_read(CUDA_BACKEND, "cuda", "cuda.streams", "binding", "torch._C", "stream")
    runtime = attributes_read(CUDA_BACKEND, "cudart", "self.cudart", "cudart.cudaError")
    used = asked | members_of(NativeEvent, NativeStream)
    assert "_cuda_setStream" in asked
    assert "cudaHostRegister" in runtime
    assert used - {"streams"} - names_of(TORCH_CUDA) == set()
    said = " ".join(word for fact in TORCH_CUDA for word in fact.detail)
    assert {name for name in runtime if name not in said} == set()


NOT_IN_THE_VENDORS = {"queue", "machine", "event_class"}
"""What the fakes have for themselves."""


def signatures_of(fake_class):
    """Each public method of a fake, with the names of its parameters."""
    for name in sorted({name for base in fake_class.__mro__[:-1] for name in vars(base)}):
        method = inspect.getattr_static(fake_class, name)
        if (name == "__new__" or not name.startswith("_")) and inspect.isroutine(method):
            parameters = [
                parameter.name
                for parameter in inspect.signature(getattr(fake_class, name)).parameters.values()
                if parameter.kind is not inspect.Parameter.VAR_KEYWORD
            ]
            yield name, tuple(parameters[0 if name == "__new__" and parameters[:1] != ["cls"] else 1 :])


def facts_about(fake_class, *places):
    """That a fake's methods take what the real ones do, in each of the places where they may stand."""
    return {
        name: [takes(module, owner, name, *parameters) for module, owner in places]
        for name, parameters in signatures_of(fake_class)
        if name not in NOT_IN_THE_VENDORS
    }


def lacking_everywhere(sources, facts):
    return {name for name, places in facts.items() if len(sources.lacking(places)) == len(places)}


@pytest.mark.packaging
def test_the_fake_torch_npu_takes_what_the_wheel_takes(torch_npu):
    sources = EngineSources(torch_npu)
    of_module = facts_about(fake_torch_npu.NpuModule, ("npu/__init__.py", None), ("npu/utils.py", None))
    assert len(of_module) >= 9
    assert lacking_everywhere(sources, of_module) == set()
    for fake_class in (fake_torch_npu.Stream, fake_torch_npu.Event):
        facts = facts_about(fake_class, ("npu/streams.py", fake_class.__name__))
        assert len(facts) >= 4
        assert lacking_everywhere(sources, facts) == set()
    runtime = {name for name in vars(fake_torch_npu.Npurt) if not name.startswith("_")}
    in_c = {"npu_stream", "priority", *runtime}
    assert names_lacking(torch_npu / TORCH_NPU_LIBRARY, sorted(in_c)) == ()


def test_the_fake_torch_cuda_takes_what_torch_takes():
    sources = EngineSources(installed_torch())
    for fake_class in (fake_torch_cuda.Stream, fake_torch_cuda.Event):
        facts = facts_about(
            fake_class,
            ("cuda/streams.py", fake_class.__name__),
            ("_C/__init__.pyi", f"_Cuda{fake_class.__name__}Base"),
        )
        assert len(facts) >= 4
        assert lacking_everywhere(sources, facts) == set()


def test_a_fake_that_takes_something_else_is_noticed():
    class Event:
        def record(self, stream=None): ...

        def query(self, timeout_s): ...

        def invented(self): ...

    facts = facts_about(Event, ("cuda/streams.py", "Event"))
    assert lacking_everywhere(EngineSources(installed_torch()), facts) == {"query", "invented"}
