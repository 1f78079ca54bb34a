# SPDX-License-Identifier: Apache-2.0
"""The detector that knows nothing of any mutant: random workloads, judged row by row, in schedules a seed decides."""

import sys

from mutants.model import WORKLOAD
from omni_core.testing.hazards import HazardError
from omni_core.testing.seeded_runtime import SeededRuntime
from omni_core.testing.watched_workload import run_watched_workload
from omni_core.testing.workload_config import WorkloadConfig

STALL_LIMIT_S = 5.0
"""Virtual seconds; below every time-out of the cache, so that a lost wake-up is told as one."""
MANNERS = {"plain": WorkloadConfig.draw, "cramped": WorkloadConfig.draw_cramped}


def gist(error: Exception) -> str:
    """What happened, in a line."""
    if isinstance(error, HazardError):
        return ", ".join(sorted(kind.value for kind in error.kinds))
    return str(error).partition("\n")[0]


def main(num_seeds: int) -> int:
    """Run workloads until one is wrong; returns 1 then, having printed it as pytest prints a failed test."""
    for seed in range(num_seeds):
        for manner, draw in MANNERS.items():
            try:
                with SeededRuntime(seed, stall_limit_s=STALL_LIMIT_S) as runtime:
                    run_watched_workload(seed, draw(seed), runtime)
            except Exception as error:
                print(f"FAILED {WORKLOAD}{manner}, seed {seed} - {type(error).__name__}: {gist(error)}")
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
