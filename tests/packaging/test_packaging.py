# SPDX-License-Identifier: Apache-2.0
"""The distribution works however it is installed, holds every file of the tree, and leaves nothing when it goes.

Each installation goes into a fresh environment. Its dependencies are links to those of the environment that runs the
tests, all but this project, so that nothing is downloaded.
"""

import json
import os
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import omni_core

pytestmark = [pytest.mark.packaging, pytest.mark.timeout(300)]

REPOSITORY = Path(__file__).parents[2]
TOY = REPOSITORY / "tests" / "fixtures" / "third_party" / "omni_core_toy"
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
WHEEL_PACKAGES = [Path(package) for package in PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]]
PACKAGE_NAMES = [package.name for package in WHEEL_PACKAGES]


def run(*command, cwd="/"):
    """Run a command outside the source tree, so that nothing is importable by accident; its output if it succeeds."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


class Environment:
    """A fresh virtual environment that sees the dependencies and not this project."""

    def __init__(self, path, dependencies):
        venv.create(path, symlinks=True, with_pip=False)
        self.bin = path / "bin"
        self.python = self.bin / "python"
        (self.site_packages,) = path.glob("lib/python*/site-packages")
        self.root = path
        (self.site_packages / "dependencies_of_the_tests.pth").write_text(f"{dependencies}\n")

    def pip(self, *arguments):
        return run(sys.executable, "-m", "pip", "--python", self.python, "-qq", *arguments)

    def install(self, *what):
        self.pip("install", "--no-deps", "--no-index", "--no-build-isolation", *what)

    def backends(self):
        """What `omni-core backends --format json` says, by name."""
        listed = json.loads(run(self.bin / "omni-core", "backends", "--format", "json"))
        return {entry["name"]: entry for entry in listed["backends"]}

    def imported_from(self, *packages):
        """The folders that hold the packages once imported."""
        program = f"import {', '.join(packages)}\nfor package in ({', '.join(packages)},): print(package.__file__)"
        return [Path(line).parents[1] for line in run(self.python, "-c", program).splitlines()]

    def files(self):
        return {
            path.relative_to(self.root)
            for path in self.root.rglob("*")
            if "__pycache__" not in path.parts and path.suffix != ".pyc"
        }


@pytest.fixture(scope="module")
def dependencies(tmp_path_factory):
    links = tmp_path_factory.mktemp("dependencies")
    for folder in map(Path, sys.path):
        if folder.name in ("site-packages", "dist-packages"):
            for entry in folder.iterdir():
                ours = entry.name.lstrip("_").startswith(("omni_core", "omni-core"))
                if not ours and entry.suffix != ".pth" and not (links / entry.name).exists():
                    (links / entry.name).symlink_to(entry)
    return links


@pytest.fixture
def environment(tmp_path, dependencies):
    return Environment(tmp_path / "env", dependencies)


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-m", "build", "--no-isolation", "--sdist", "--outdir", folder, REPOSITORY)
    (archive,) = folder.iterdir()
    return archive


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build_wheel(REPOSITORY, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def wheel_from_sdist(sdist, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (tree,) = folder.iterdir()
    return build_wheel(tree, tmp_path_factory.mktemp("wheel_from_sdist"))


def build_wheel(tree, folder):
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", folder, tree)
    (archive,) = folder.iterdir()
    return archive


def files_of_wheel(wheel):
    """Its files without the metadata."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def files_of_tree():
    """The files of the packages as the wheel should hold them."""
    return {
        path.relative_to((REPOSITORY / package).parent).as_posix()
        for package in WHEEL_PACKAGES
        for path in (REPOSITORY / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def check_three_backends(listed):
    assert set(listed) == {"cpu_sim", "cuda", "npu"}
    assert listed["cpu_sim"]["available"] is True
    assert {entry["distribution"] for entry in listed.values()} == {"omni-core"}
    assert {entry["version"] for entry in listed.values()} == {omni_core.__version__}


def test_editable_install(environment):
    environment.install("--editable", REPOSITORY)
    check_three_backends(environment.backends())
    assert environment.imported_from(*PACKAGE_NAMES) == [REPOSITORY / package.parent for package in WHEEL_PACKAGES]


def test_wheel(environment, wheel):
    environment.install(wheel)
    check_three_backends(environment.backends())
    assert set(environment.imported_from(*PACKAGE_NAMES)) == {environment.site_packages}


def test_wheel_from_the_source_distribution(environment, wheel_from_sdist):
    environment.install(wheel_from_sdist)
    check_three_backends(environment.backends())


def test_wheels_hold_exactly_the_files_of_the_tree(wheel, wheel_from_sdist):
    tree = files_of_tree()
    assert {"omni_core/py.typed", "omni_core_cpu_sim/py.typed", "omni_core_npu/__init__.py"} <= tree
    assert files_of_wheel(wheel) == tree
    assert files_of_wheel(wheel_from_sdist) == tree


def test_every_backend_of_the_tree_is_in_the_wheel_and_registered():
    in_tree = {path.parent.relative_to(REPOSITORY) for path in (REPOSITORY / "backends").glob("*/*/__init__.py")}
    assert in_tree == set(WHEEL_PACKAGES) - {Path("omni_core")}
    registered = PROJECT["project"]["entry-points"]["omni_core.backends"]
    assert {value.partition(":")[0] for value in registered.values()} == {path.name for path in in_tree}


def test_wheel_metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = archive.read(name).decode()
        assert any(name.endswith("/licenses/LICENSE") for name in archive.namelist())
    lines = metadata.splitlines()
    assert "License-Expression: Apache-2.0" in lines
    assert "Requires-Python: >=3.11" in lines
    required = {line for line in lines if line.startswith("Requires-Dist:") and "extra ==" not in line}
    assert {line.split()[1].partition(">")[0] for line in required} == {"torch", "numpy", "stevedore"}


def test_the_source_distribution_can_be_tested_and_documented(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    expected = {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "Makefile", "scripts/setup_venv.sh"}
    expected |= {"tests/conftest.py", "tests/fixtures/third_party/omni_core_toy/pyproject.toml"}
    assert expected <= names


CONFORMANCE = """
import torch
from omni_core.backend.conformance import run_conformance
from omni_core.backend.registry import backend_for_tensor, create_backend
from omni_core.runtime import ThreadingRuntime

runtime = ThreadingRuntime()
results = run_conformance(lambda runtime: create_backend("toy", runtime=runtime))
for result in results:
    assert result.passed, (result.check.name, result.error)
assert len(results) > 5
backend = backend_for_tensor(torch.zeros(1), runtime=runtime, override="toy")
print(type(backend).__module__, type(backend).__name__)
"""


def test_third_party_backend_is_found_passes_conformance_and_can_go_again(environment, wheel):
    environment.install(wheel)
    environment.install(TOY)
    listed = environment.backends()
    assert set(listed) == {"cpu_sim", "cuda", "npu", "toy"}
    assert (listed["toy"]["distribution"], listed["toy"]["version"]) == ("omni-core-toy", "1.2.3")
    assert listed["toy"]["available"] is True
    assert run(environment.python, "-c", CONFORMANCE).strip() == "omni_core_toy ToyBackend"
    environment.pip("uninstall", "-y", "omni-core-toy")
    check_three_backends(environment.backends())


USERS_TEST = """
from omni_core.testing import FakeModel, SimRequest, hidden_key


def test_fixtures(sim_engine, stage_oracle):
    stage = sim_engine(FakeModel(hidden_key(2)))
    stage.submit(SimRequest("a", (1, 2, 3, 4, 5)))
    assert stage_oracle(stage).rows_delivered == 5
"""


def test_a_users_project_has_the_fixtures_of_the_installed_wheel(environment, wheel, tmp_path):
    environment.install(wheel)
    project = tmp_path / "project"
    project.mkdir()
    (project / "test_users.py").write_text(USERS_TEST)
    assert "1 passed" in run(environment.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=project)


@pytest.mark.parametrize("editable", [True, False], ids=["editable", "wheel"])
def test_uninstall_leaves_nothing(environment, wheel, editable):
    before = environment.files()
    environment.install(*(["--editable", REPOSITORY] if editable else [wheel]))
    assert environment.files() > before
    environment.pip("uninstall", "-y", "omni-core")
    assert environment.files() == before
