# SPDX-License-Identifier: Apache-2.0
"""Backends are found by entry point and chosen by the tensor's device; every refusal names the choices."""

import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from omni_core import backend as errors
from omni_core.backend.registry import (
    backend_for_tensor,
    create_backend,
    explain_backends,
    installed_backends,
    load_backend_class,
)
from omni_core.runtime import ThreadingRuntime

BACKEND_SOURCE = """
from omni_core.backend import DeviceBackend

class Backend(DeviceBackend):
    name = {name!r}
    device_type = {device_type!r}

    def __init__(self, runtime, *, depth=1):
        self.depth = depth

    @classmethod
    def unavailable_reason(cls):
        {availability}

Backend.__abstractmethods__ = frozenset()  # nothing here moves data
"""


@dataclass
class Site:
    """A folder on `sys.path` that distributions of backends are put into, as pip would put them."""

    path: Path
    modules: list[str] = field(default_factory=list)

    def add(self, distribution, name, *, source=None, device_type="toydev", availability="return None", registers=None):
        """Add a distribution with one backend; `registers` is the entry point's name if it is not the class's."""
        module = distribution.replace("-", "_")
        text = BACKEND_SOURCE.format(name=name, device_type=device_type, availability=availability)
        (self.path / f"{module}.py").write_text(text if source is None else textwrap.dedent(source))
        self.modules.append(module)
        info = self.path / f"{module}-4.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 4.5\n")
        (info / "entry_points.txt").write_text(f"[omni_core.backends]\n{registers or name} = {module}:Backend\n")

    def imported(self):
        return sorted(module for module in self.modules if module in sys.modules)


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    site = Site(tmp_path)
    yield site
    for module in site.modules:
        sys.modules.pop(module, None)


@pytest.fixture
def runtime():
    return ThreadingRuntime()


@dataclass
class TensorOn:
    """Stands for a tensor on a device this machine has not got."""

    where: str

    @property
    def device(self):
        return torch.device(self.where)


# --- listing


def test_the_backends_of_this_distribution_are_listed_sorted_with_their_origin():
    ours = [backend for backend in installed_backends() if backend.distribution == "omni-core"]
    assert [backend.name for backend in ours] == ["cpu_sim", "cuda", "npu"]
    assert {backend.version for backend in ours} == {"0.1.0"}
    assert ours[0].entry_point == "omni_core_cpu_sim:CpuSimBackend"


def test_listing_imports_nothing(site):
    site.add("zeta-plugin", "zeta")
    site.add("alpha-plugin", "alpha")
    names = [backend.name for backend in installed_backends()]
    assert names == sorted(names)
    assert {"alpha", "zeta"} < set(names)
    assert site.imported() == []


def test_loading_one_imports_only_that_one(site):
    site.add("zeta-plugin", "zeta")
    site.add("alpha-plugin", "alpha")
    assert load_backend_class("zeta").name == "zeta"
    assert site.imported() == ["zeta_plugin"]


def test_a_distribution_installed_later_in_the_process_is_found(site):
    with pytest.raises(errors.UnknownBackendError):
        load_backend_class("late")
    site.add("late-plugin", "late")
    assert load_backend_class("late").name == "late"


# --- by name


def test_unknown_name_names_the_choices(runtime):
    with pytest.raises(errors.UnknownBackendError, match=r"'cdua'.*cpu_sim .*cuda .*npu .*omni-core 0\.1\.0"):
        create_backend("cdua", runtime=runtime)


@pytest.mark.parametrize("same_module", [False, True])
def test_a_name_of_two_distributions_names_both_and_loads_neither(site, same_module):
    site.add("first-vendor", "gpu")
    site.add("second-vendor", "gpu")
    site.add("between-vendor", "hpu")
    if same_module:  # the very same line: stevedore's own list would show one
        info = site.path / "second_vendor-4.5.dist-info" / "entry_points.txt"
        info.write_text("[omni_core.backends]\ngpu = first_vendor:Backend\n")
    with pytest.raises(errors.DuplicateBackendError, match=r"'gpu'.*first-vendor 4\.5.*and.*second-vendor 4\.5"):
        load_backend_class("gpu")
    assert site.imported() == []


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import no_such_vendor_runtime", r"ModuleNotFoundError.*no_such_vendor_runtime"),
        ("raise RuntimeError('driver 1 is older than runtime 2')", r"RuntimeError: driver 1 is older than runtime 2"),
        ("raise SystemExit(3)", r"SystemExit: 3"),
        ("assert False, 'stevedore lets this one through'", r"AssertionError: stevedore lets this one through"),
        ("Other = 1", r"AttributeError"),
        ("Backend = 7", r"7, which is not a subclass of DeviceBackend"),
        ("class Backend: name = 'vendor'", r"not a subclass of DeviceBackend"),
        ("from omni_core.backend import DeviceBackend as Backend", r"does not set 'name'"),
    ],
)
def test_what_is_no_backend_is_refused_with_its_reason(site, source, says):
    site.add("vendor-plugin", "vendor", source=source)
    with pytest.raises(errors.BrokenBackendError, match=r"(?s)'?vendor.*" + says):
        load_backend_class("vendor")


def test_a_backend_registered_under_another_name_than_its_own_is_refused(site):
    site.add("vendor-plugin", "real", registers="alias")
    with pytest.raises(errors.BrokenBackendError, match=r"'alias'.*calls itself 'real'"):
        load_backend_class("alias")


def test_an_unavailable_backend_is_refused_with_its_reason_and_the_way_out(site, runtime):
    site.add("vendor-plugin", "vendor", availability="return 'no board in any slot'")
    with pytest.raises(
        errors.BackendUnavailableError, match=r"'vendor'.*no board in any slot.*`omni-core backends` lists"
    ):
        create_backend("vendor", runtime=runtime)


def test_options_reach_the_backend_and_unknown_ones_are_named(site, runtime):
    site.add("vendor-plugin", "vendor")
    assert create_backend("vendor", runtime=runtime, options={"depth": 3}).depth == 3
    with pytest.raises(errors.BackendOptionError, match=r"'vendor'.*'width'.*depth=1"):
        create_backend("vendor", runtime=runtime, options={"width": 3})


def test_a_backend_that_looks_empty_is_still_the_instance(site, runtime):
    # stevedore's own `driver` tests the truth of the instance and would hand back the class.
    source = BACKEND_SOURCE.format(name="hollow", device_type="toydev", availability="return None")
    site.add("hollow-plugin", "hollow", source=source + "\nBackend.__len__ = lambda self: 0\n")
    made = create_backend("hollow", runtime=runtime)
    assert isinstance(made, load_backend_class("hollow"))


# --- by tensor


def test_a_cpu_tensor_gets_the_simulator(runtime):
    made = backend_for_tensor(torch.zeros(2), runtime=runtime)
    try:
        assert made.name == "cpu_sim"
        assert made.owns(torch.zeros(2))
    finally:
        made.close()


@pytest.mark.parametrize("device", ["cuda:1", "cuda"])
def test_an_accelerator_tensor_never_falls_to_the_simulator(runtime, device):
    with pytest.raises(errors.BackendUnavailableError, match=r"'cuda'.*built without CUDA"):
        backend_for_tensor(TensorOn(device), runtime=runtime)


def test_a_device_without_backend_names_the_installed_ones_and_what_to_install(runtime):
    with pytest.raises(
        errors.NoBackendForTensorError,
        match=r"'xpu' tensors.*'xpu:2'.*cpu_sim .*owns 'cpu'.*cuda .*owns 'cuda'.*npu .*owns 'npu'.*"
        r"Install a distribution that registers a backend for 'xpu' under 'omni_core\.backends'",
    ):
        backend_for_tensor(TensorOn("xpu:2"), runtime=runtime)


def test_a_broken_backend_is_named_where_it_might_have_owned_the_tensor(site, runtime):
    site.add("xpu-plugin", "xpu", source="raise ImportError('libze.so: cannot open')")
    with pytest.raises(errors.NoBackendForTensorError, match=r"xpu \(from xpu-plugin 4\.5\).*libze\.so"):
        backend_for_tensor(TensorOn("xpu:0"), runtime=runtime)


def test_a_broken_backend_does_not_stand_in_the_way_of_another_devices_tensor(site, runtime):
    site.add("xpu-plugin", "xpu", source="raise ImportError('libze.so: cannot open')")
    made = backend_for_tensor(torch.zeros(1), runtime=runtime)
    made.close()
    assert made.name == "cpu_sim"


def test_a_third_party_backend_is_chosen_by_its_device(site, runtime):
    site.add("xpu-plugin", "xpu_fast", device_type="xpu")
    assert backend_for_tensor(TensorOn("xpu:0"), runtime=runtime, options={"depth": 2}).depth == 2


def test_the_override_chooses_among_owners(site, runtime):
    site.add("other-sim", "other_sim", device_type="cpu")
    assert backend_for_tensor(torch.zeros(1), runtime=runtime, override="other_sim").name == "other_sim"


def test_the_override_imports_only_the_one_it_names(site, runtime):
    site.add("other-sim", "other_sim", device_type="cpu")
    site.add("third-sim", "third_sim", device_type="cpu")
    backend_for_tensor(torch.zeros(1), runtime=runtime, override="third_sim")
    assert site.imported() == ["third_sim"]


def test_the_override_must_own_the_tensor(runtime):
    with pytest.raises(
        errors.NoBackendForTensorError, match=r"backend='npu' owns 'npu' tensors.*'cpu'.*cpu_sim .*owns 'cpu'"
    ):
        backend_for_tensor(torch.zeros(1), runtime=runtime, override="npu")


def test_two_owners_are_not_chosen_between_by_order(site, runtime):
    site.add("other-sim", "a_sim", device_type="cpu")
    with pytest.raises(errors.AmbiguousBackendError, match=r"2 installed.*'cpu'.*a_sim, cpu_sim.*Set `backend`"):
        backend_for_tensor(torch.zeros(1), runtime=runtime)


def test_an_owner_this_machine_cannot_run_is_no_rival(site, runtime):
    site.add("other-sim", "a_sim", device_type="cpu", availability="return 'needs a licence'")
    made = backend_for_tensor(torch.zeros(1), runtime=runtime)
    made.close()
    assert made.name == "cpu_sim"


def test_a_duplicate_name_stops_the_choice_by_device(site, runtime):
    site.add("first-vendor", "gpu", device_type="cpu")
    site.add("second-vendor", "gpu", device_type="xpu")
    with pytest.raises(errors.DuplicateBackendError, match=r"first-vendor.*second-vendor"):
        backend_for_tensor(torch.zeros(1), runtime=runtime)


# --- explaining


def test_explaining_hides_nothing(site):
    site.add("good-plugin", "good")
    site.add("poor-plugin", "poor", availability="return 'no board'")
    site.add("rude-plugin", "rude", availability="raise OSError('ioctl failed')")
    site.add("torn-plugin", "torn", source="import no_such_vendor_runtime")
    site.add("first-vendor", "twin")
    site.add("second-vendor", "twin")
    reports = explain_backends()
    said = {(report.installed.name, report.installed.distribution): report.reason for report in reports}
    assert said["good", "good-plugin"] is None
    assert said["poor", "poor-plugin"] == "no board"
    assert "unavailable_reason() raised OSError: ioctl failed" in said["rude", "rude-plugin"]
    assert "no_such_vendor_runtime" in said["torn", "torn-plugin"]
    for vendor in ("first-vendor", "second-vendor"):
        assert "first-vendor" in said["twin", vendor]
        assert "second-vendor" in said["twin", vendor]
    assert said["cpu_sim", "omni-core"] is None


def test_explaining_says_what_a_backend_refuses(site):
    refusing = BACKEND_SOURCE.format(name="partial", device_type="toydev", availability="return None")
    site.add("partial-plugin", "partial", source=refusing + "Backend.refuses = 'every copy'\n")
    refusals = {report.installed.name: report.refuses for report in explain_backends()}
    assert refusals["partial"] == "every copy"
    assert (refusals["cpu_sim"], refusals["cuda"], refusals["npu"]) == (None, None, None)


# --- the packages of devices that this machine has not got


@pytest.mark.parametrize("name", ["cuda", "npu"])
def test_cuda_and_npu_refuse_by_name_a_machine_without_their_device(name, runtime):
    backend_class = load_backend_class(name)
    reason = backend_class.unavailable_reason()
    if reason is None:
        pytest.skip(f"this machine has {name}")
    with pytest.raises(
        errors.BackendUnavailableError, match=rf"backend '{name}' cannot run on this machine"
    ) as refused:
        backend_class(runtime)
    assert reason in str(refused.value)
