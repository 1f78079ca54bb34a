# SPDX-License-Identifier: Apache-2.0
"""What a cache does to the memory of a process that has nothing else in it."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

PROGRAM = Path(__file__).with_name("memory_program.py")


@contextmanager
def memory_programs():
    """Gives `memory_of(**told)`: builds a cache in a process of its own and fills part of it; what was seen there.

    Each process is forked off one that has only done the imports, which take longer than all the rest.
    """
    with subprocess.Popen(
        [sys.executable, str(PROGRAM)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ) as parent:

        def memory_of(**told):
            parent.stdin.write(json.dumps(told) + "\n")
            parent.stdin.flush()
            seen = parent.stdout.readline()
            assert seen, "the program failed; its error stands above"
            return json.loads(seen)

        yield memory_of
        parent.stdin.close()
        assert parent.wait(20) == 0
