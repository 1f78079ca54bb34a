# SPDX-License-Identifier: Apache-2.0
"""Every feature of the engine under which rows come: right to the bit, or refused by name before anything starts.

Each runs in a process of its own, with Omni Core and, where both compute the same bits, without prefix caching.
"""

from pathlib import Path

import pytest
from catalogue import FEATURES
from engine_program import run_engine_program
from results import record

HERE = Path(__file__).parent

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1200)]

HERE_SHOWN = [name for name, feature in FEATURES.items() if feature.scenario]


@pytest.mark.parametrize("name", HERE_SHOWN)
def test_rows_are_right_under_this_feature_or_it_is_refused_by_name(name, tmp_path):
    feature = FEATURES[name]
    outcome = run_engine_program(
        HERE / "run_feature.py", name, tmp_path / "result.json", modules=(HERE.parent, HERE), timeout_s=1100
    )
    assert outcome["status"] == feature.expected, outcome
    record(
        name,
        status=outcome["status"],
        rows=outcome["verdict"].get("rows", 0),
        rows_from_hits=outcome["verdict"].get("rows_from_hits", 0),
        detail=outcome["detail"],
        shown=outcome["evidence"],
    )
