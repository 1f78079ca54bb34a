# SPDX-License-Identifier: Apache-2.0
"""A real vLLM whose Omni Core settings come from its flag, the environment and a file."""

from pathlib import Path

import pytest
from engine_program import run_engine_program

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

HERE = Path(__file__).parent


@pytest.fixture
def start(tmp_path):
    def start_with(name, file, **variables):
        path = tmp_path / "omni_core.toml"
        path.write_text(file)
        return run_engine_program(
            HERE / "settings_from_everywhere.py",
            name,
            tmp_path / f"{name}.json",
            modules=[HERE],
            OMNI_CORE_CONFIG_FILE=str(path),
            **variables,
        )

    return start_with


def test_each_setting_is_what_its_first_source_says_and_the_stage_tells_which(start):
    seen = start(
        "right",
        'staging_depth = 5\nshutdown_timeout_s = 8\nextra_step_bytes = "2 MiB"\n',
        OMNI_CORE_STAGING_DEPTH="3",
        OMNI_CORE_SHUTDOWN_TIMEOUT_S="9",
    )
    told = {name: (one["value"], one["origin"]) for name, one in seen["settings"].items()}
    assert told["enabled"] == (True, "flag")
    assert told["shutdown_timeout_s"] == (7.0, "flag")
    assert told["staging_depth"] == (3, "environment")
    assert told["extra_step_bytes"] == (2 << 20, "file")
    assert told["sink"] == ("memory", "default")
    assert seen["staging_bytes"] % 3 == 0
    assert seen["staging_bytes"] // 3 > 2 << 20  # three pages, each with the file's extra bytes
    [line] = [text for text in seen["log"] if "not defaults" in text]
    assert "staging_depth=3 (OMNI_CORE_STAGING_DEPTH)" in line
    assert "shutdown_timeout_s=7.0 (omni_core.shutdown_timeout_s)" in line


def test_every_mistake_stops_the_start_at_once(start):
    problems = start("wrong", "layers = [1]\n", OMNI_CORE_SINK_QUEUE_BYTES="lots")["problems"]
    assert len(problems) == 3
    unknown, variable, file = problems
    assert "omni_core.stagin_depth; did you mean 'staging_depth'?" in unknown
    assert "OMNI_CORE_SINK_QUEUE_BYTES='lots': must be" in variable
    assert "layers decides what vLLM compiles" in file
