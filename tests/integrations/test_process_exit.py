# SPDX-License-Identifier: Apache-2.0
"""A process with an open stage ends with its own exit code, in time, whatever its sink does, and leaves whole files."""

import json
import subprocess
import sys
from pathlib import Path

import exiting_stages
import pytest

from omni_core.sinks.base import RequestEnd
from omni_core.sinks.safetensors_files import read_request_file, request_files

EXIT_CODES = {"ends_by_itself": 0, "exits": 3, "is_killed": -9}
EXIT_CODES_STUCK = {"raises": 1, "is_terminated": 0}


@pytest.fixture(scope="module")
def exits(tmp_path_factory):
    root = tmp_path_factory.mktemp("exits")
    script = [sys.executable, str(Path(exiting_stages.__file__)), str(root)]
    done = subprocess.run(script, stdout=subprocess.PIPE, text=True, timeout=100, check=True)
    return root, json.loads(done.stdout)


@pytest.mark.parametrize(("way", "code"), EXIT_CODES.items())
def test_a_process_whose_sink_works_ends_with_its_code_and_delivers_before_it_goes(exits, way, code):
    root, codes = exits
    assert codes[way] == code
    stored = [read_request_file(path) for path in request_files(root / way)]
    expected = [] if way == "is_killed" else [("a-00000001", RequestEnd.FLUSHED, exiting_stages.PROMPT)]
    assert [(one.req_id, one.end, one.token_ids.tolist()) for one in stored] == expected


@pytest.mark.parametrize(("way", "code"), EXIT_CODES_STUCK.items())
def test_a_process_whose_sink_is_stuck_ends_with_its_code_all_the_same(exits, way, code):
    root, codes = exits
    assert codes[f"{way}, sink stuck"] == code
    assert request_files(root / f"{way}, sink stuck") == ()
