# SPDX-License-Identifier: Apache-2.0
"""Reserved is not committed: a process's memory follows the blocks that are written, in a process of its own.

Tolerance of every comparison: 2 MiB for each table array that a block touches first (numpy asks for huge pages), and
for what the interpreter and the threads allocate beside. On the machine this was written on the rest was 0.3 to 2.4 MB.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "support" / "memory_program.py"
TABLE_ARRAYS = 10
TOLERANCE_BYTES = (TABLE_ARRAYS + 2) * (2 << 20)
HIDDEN = "__hidden_states__"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps_rollup")


def memory_of(**told):
    done = subprocess.run(
        [sys.executable, str(PROGRAM), json.dumps(told)],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_million_blocks_cost_nothing_until_they_are_written():
    told = {"num_blocks": 1_000_000, "block_size": 16, "hidden_size": 2048, "hidden_dtype": "bfloat16"}
    seen = memory_of(**told, max_num_tokens=1024, staging_depth=2, fill_blocks=2500)
    reserved = seen["memory_when_filled"]
    assert reserved["pool_bytes"] == {HIDDEN: 65_536_000_000}
    assert reserved["shared_table_bytes"] + reserved["key_table_bytes"][HIDDEN] > 500_000_000
    staging_bytes = reserved["staging_bytes"] + reserved["snapshot_ring_bytes"]
    assert abs(seen["growth_when_built"] - staging_bytes) < TOLERANCE_BYTES
    assert abs(seen["growth_when_one_block_is_written"] - staging_bytes) < TOLERANCE_BYTES
    written_bytes = 2500 * 16 * 4096
    assert seen["resident_pool_bytes"] == {HIDDEN: written_bytes}
    assert abs(seen["growth_when_filled"] - staging_bytes - written_bytes) < TOLERANCE_BYTES
