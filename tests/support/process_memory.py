# SPDX-License-Identifier: Apache-2.0
"""What a cache does to the memory of a process that has nothing else in it."""

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("memory_program.py")


def memory_of(**told):
    """Builds a cache in a process of its own and fills part of it; what `memory_program` saw."""
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
