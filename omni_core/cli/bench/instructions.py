# SPDX-License-Identifier: Apache-2.0
"""`instructions`: machine instructions of one step on the calling thread, which hardly depend on the machine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from omni_core.cli.bench.hot_loop import COUNTED_FUNCTION, MATERIALIZE, STEP
from omni_core.cli.bench.plan import Plan, say
from omni_core.cli.bench.results import BenchmarkError, Measured, Row, Target

CASES = ((STEP, 1), (STEP, 256), (MATERIALIZE, 256))
QUICK_CASES = ((STEP, 1),)
NUM_STEPS, QUICK_STEPS = 40, 3
TARGETS: tuple[Target, ...] = ()
_TIMEOUT_S = 1200.0
_LEAVE_OUT = "--skip instructions leaves it out of all"

NO_VALGRIND = "valgrind is not installed: instructions were not counted"
NOTES = (
    "counted by valgrind --tool=callgrind on the calling thread alone, per call, after a warm-up: a step is "
    "new_step_starts and save_outputs; the copies of rows are part of it",
)


def measure(plan: Plan) -> Measured:
    """One process under valgrind per case. A minute or two each."""
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        return Measured((), (*plan.notes, NO_VALGRIND))
    rows: list[Row] = []
    for what, num_requests in QUICK_CASES if plan.quick else CASES:
        say(f"instructions: {what}, {num_requests} requests")
        num_steps = plan.rounds(NUM_STEPS, QUICK_STEPS)
        counted = _count(valgrind, what, num_requests, num_steps)
        say(f"instructions: {counted // num_steps:,}")
        rows.append(
            {"what": what, "requests": num_requests, "rounds": num_steps, "instructions": round(counted / num_steps)}
        )
    return Measured(tuple(rows), (*plan.notes, *NOTES))


def _count(valgrind: str, what: str, num_requests: int, num_steps: int) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        profile = Path(scratch) / "callgrind.out"
        tool = ("--tool=callgrind", f"--toggle-collect={COUNTED_FUNCTION}", f"--callgrind-out-file={profile}")
        loop = (sys.executable, "-P", "-m", "omni_core.cli.bench.hot_loop", what, str(num_requests), str(num_steps))
        try:
            done = subprocess.run(
                [valgrind, *tool, *loop],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
                timeout=_TIMEOUT_S,
                # Hashes decide how dictionaries collide; torch's own threads would hide copies from the count.
                env={**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
            )
        except subprocess.TimeoutExpired:
            raise BenchmarkError(f"valgrind did not end within {_TIMEOUT_S:g} s; {_LEAVE_OUT}") from None
        if done.returncode != 0:
            raise BenchmarkError(
                f"valgrind ended with status {done.returncode}; {_LEAVE_OUT}. It said:\n{done.stderr[-2000:]}"
            )
        totals = re.search(r"^(?:totals|summary): (\d+)", profile.read_text(encoding="utf-8"), re.MULTILINE)
    if totals is None:
        raise BenchmarkError(f"valgrind wrote no totals; {_LEAVE_OUT}")
    return int(totals.group(1))
