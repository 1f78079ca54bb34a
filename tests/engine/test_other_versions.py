# SPDX-License-Identifier: Apache-2.0
"""The engine tests on the other vLLM releases, each in an environment of its own that holds that vLLM.

`scripts/setup_vllm.sh VERSION` prepares one; `make soak` prepares those of `Runs.NIGHTLY`.
"""

import os
import subprocess
from pathlib import Path

import pytest

from omni_core.integrations.vllm.releases.engine_releases import ENGINE_RELEASES, Runs

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]

PASS_ON_EVERY_RELEASE = (
    "tests/integrations",
    "tests/engine/test_rows_of_a_real_engine.py",
    "tests/engine/test_real_scheduler.py",
)

NEWER_SCHEDULER_FACTS = {
    # Which step a lone long prompt is cut in, and which request priority takes blocks from, is another before 0.31.
    # Nothing rests on the first; the gate refuses the second on every release.
    "test_a_long_prompt_is_cut_and_only_the_threshold_spares_a_lone_request": (0, 31),
    "test_by_priority_a_tenancy_may_be_hidden_and_its_digest_shows_that_its_rows_are_anothers": (0, 31),
    "test_without_digests_a_hidden_tenancy_would_deliver_rows_of_another_request": (0, 31),
    # Its seeds make each thing happen often enough under 0.32; the explored schedules judge rows on every release.
    "test_random_workloads_on_the_real_scheduler": (0, 32),
}
"""Tests of what a scheduler does, and the first release that does it."""


def environment_of(tested):
    python = ROOT / f".venv-vllm-{tested}" / "bin" / "python"
    if not (python.parents[1] / ".omni-core-ready").exists():
        pytest.skip(f"vLLM {tested} is not prepared; run scripts/setup_vllm.sh {tested}")
    return python


OTHERS = [one for one in ENGINE_RELEASES if one.runs is not Runs.ALWAYS]


@pytest.mark.parametrize("one", OTHERS, ids=[one.tested for one in OTHERS])
def test_the_engine_tests_pass_on_another_release(one, tmp_path):
    python = environment_of(one.tested)
    left_out = [
        f"--deselect=tests/engine/test_real_scheduler.py::{test}"
        for test, since in NEWER_SCHEDULER_FACTS.items()
        if one.release < since
    ]
    # The feature matrix is of the release that every run uses.
    run = subprocess.run(
        [
            str(python),
            "-m",
            "pytest",
            "-q",
            "-x",
            "-m",
            "not slow",
            "-p",
            "no:cacheprovider",
            f"--basetemp={tmp_path}",
            *left_out,
            *PASS_ON_EVERY_RELEASE,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
