# SPDX-License-Identifier: Apache-2.0
"""The worked example of a model passes its own tests in a project of its own, and the page shows what it prints."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from omni_core.testing.model_check import Problem

REPOSITORY = Path(__file__).parents[2]
EXAMPLE = REPOSITORY / "examples" / "talker_codes"
PAGE = REPOSITORY / "docs" / "testing-your-model.md"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """`pytest -s` on a copy of the example, where nothing of this repository's configuration is found."""
    copy = tmp_path_factory.mktemp("project") / "talker_codes"
    shutil.copytree(EXAMPLE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-s", "-W", "error", "-p", "no:cacheprovider"],
        cwd=copy,
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST")},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def report_in(text):
    """The first report in `text`, its figures left out: they depend on the simulated scheduler's every choice."""
    lines = text.partition("outputs of Talker")[2].splitlines()
    indented = next((i for i, line in enumerate(lines[1:], 1) if not line.startswith("  ")), len(lines))
    return re.sub(r"\d+", "#", "\n".join(lines[:indented])).replace("requests", "request")


def test_the_example_passes_its_own_tests(run):
    assert run.returncode == 0, run.stdout + run.stderr
    tests = len(re.findall(r"^def test_", (EXAMPLE / "test_talker.py").read_text(encoding="utf-8"), re.MULTILINE))
    assert f"{tests} passed" in run.stdout


def test_the_page_shows_the_report_as_it_is_printed(run):
    assert report_in(PAGE.read_text(encoding="utf-8")) == report_in(run.stdout) != ""


def test_the_page_explains_every_problem():
    table = PAGE.read_text(encoding="utf-8").partition("| Problem | Means |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| ([^|]+) \| \S", table, re.MULTILINE) == [problem.value for problem in Problem]
