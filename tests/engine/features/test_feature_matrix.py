# SPDX-License-Identifier: Apache-2.0
"""Every feature of the engine under which rows come: right to the bit, or refused by name before anything starts.

Each runs in a process of its own, with Omni Core and, where both compute the same bits, without prefix caching.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from catalogue import FEATURES
from results import record

HERE = Path(__file__).parent

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1200)]

MODULES = os.pathsep.join(filter(None, (str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH"))))
HERE_SHOWN = [name for name, feature in FEATURES.items() if feature.scenario]


@pytest.mark.parametrize("name", HERE_SHOWN)
def test_rows_are_right_under_this_feature_or_it_is_refused_by_name(name, tmp_path):
    feature, result = FEATURES[name], tmp_path / "result.json"
    run = subprocess.run(
        [sys.executable, str(HERE / "run_feature.py"), name, str(result)],
        capture_output=True,
        text=True,
        timeout=1100,
        check=False,
        # vLLM warns a lot of its own.
        env=os.environ | {"PYTHONWARNINGS": "default", "PYTHONPATH": MODULES},
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-6000:]
    outcome = json.loads(result.read_text())
    assert (outcome["status"], outcome["detail"]) == (feature.expected, outcome["detail"]), outcome
    record(
        name,
        status=outcome["status"],
        rows=outcome["verdict"].get("rows", 0),
        rows_from_hits=outcome["verdict"].get("rows_from_hits", 0),
        detail=outcome["detail"],
        shown=outcome["evidence"],
    )
