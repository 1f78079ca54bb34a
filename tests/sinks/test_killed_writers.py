# SPDX-License-Identifier: Apache-2.0
"""A process killed with SIGKILL leaves whole files only, and every whole file is found again."""

import json
import subprocess
import sys
from pathlib import Path

import killed_writers
import pytest

from omni_core.sinks.safetensors_files import SafetensorsSink, read_requests_of_client, request_files


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    path = tmp_path_factory.mktemp("killed")
    script = str(Path(killed_writers.__file__))
    done = subprocess.run(
        [sys.executable, script, str(path)], stdout=subprocess.PIPE, text=True, timeout=60, check=True
    )
    assert set(json.loads(done.stdout).values()) == {-9}
    return path


@pytest.mark.parametrize("point", killed_writers.POINTS)
def test_only_whole_requests_are_there_after_a_kill_and_all_of_them_are_found(root, point):
    named = "index" in point
    expected = ["whole-00000000", "late-00000001"] if named else ["whole-00000000"]
    found = read_requests_of_client(root / point, "c")
    assert [one.req_id for one in found] == expected
    assert all(one.complete for one in found)
    assert len(request_files(root / point)) == len(expected)


def test_the_next_run_adds_to_an_index_whose_last_line_was_cut_short(root, make):
    directory = root / "while_the_index_names_it"
    sink = SafetensorsSink(directory)
    sink.accept(make.delivery("next-00000002", (0, 4), client="c"))
    sink.finish(make.ended("next-00000002", client="c"))
    sink.close()
    found = [one.req_id for one in read_requests_of_client(directory, "c")]
    assert found == ["whole-00000000", "next-00000002", "late-00000001"]  # what no line names comes last
