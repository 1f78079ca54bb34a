# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the engine step runs, and reports every figure with its floor and its interval."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "engine_step.py"
FEW = ("--requests", "1,3", "--steps", "4", "--hit-tokens", "64", "--hit-reads", "3")
FIGURES = [
    ("engine step", 1),
    ("engine step, back to back", 1),
    ("materialize", 1),
    ("engine step", 3),
    ("engine step, back to back", 3),
    ("materialize", 3),
    ("hit read", 1),
]
ROW_BYTES = 2048 * 2
CODES_BYTES = 16 * 4


def run_benchmark(*arguments):
    done = subprocess.run(
        [sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def report():
    return json.loads(run_benchmark(*FEW, "--format", "json"))


def test_it_reports_every_figure_once(report):
    assert [(result["name"], result["requests"]) for result in report["results"]] == FIGURES


def test_a_figure_is_the_ratio_of_two_medians_inside_its_interval(report):
    for result in report["results"]:
        assert result["rounds"] >= 3
        assert result["ratio"] == pytest.approx(result["median_us"] / result["floor_median_us"])
        assert 0 < result["ratio_low"] <= result["ratio"] <= result["ratio_high"]


def test_floor_and_call_move_the_same_bytes(report):
    of_decode = ROW_BYTES + CODES_BYTES
    assert {(result["name"], result["bytes"]) for result in report["results"] if result["requests"] == 1} == {
        ("engine step", of_decode),
        ("engine step, back to back", of_decode),
        ("materialize", of_decode),
        ("hit read", 64 * ROW_BYTES),
    }


def test_it_says_what_it_ran_on(report):
    assert {"omni_core", "torch", "numpy", "python", "machine", "cpus", "load_average"} <= report.keys()


def test_the_text_has_a_line_per_figure():
    lines = run_benchmark(*FEW).splitlines()
    assert [line.split("  ")[0] for line in lines[3:]] == [name for name, _ in FIGURES]
