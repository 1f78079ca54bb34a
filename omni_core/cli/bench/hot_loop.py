# SPDX-License-Identifier: Apache-2.0
"""A process for `instructions` to count: decode steps, of which only one call is counted. `-m … CALL REQUESTS STEPS`.

The counter runs while the interpreter is inside its function for `@=`, through which the counted call goes, and nothing
else does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Self

import torch

from omni_core.cli.bench.engine_batch import DecodeBatch, StageShape
from omni_core.cli.bench.stage import Delivered, OurStage
from omni_core.runtime import ThreadingRuntime

COUNTED_FUNCTION = "PyNumber_InPlaceMatrixMultiply"
STEP, MATERIALIZE = "step", "materialize"
WARM_UP_STEPS = 16


class Counted:
    """Calls through the function that the counter watches: `counted @= call`."""

    result: Any = None
    """What the latest call returned."""

    def __imatmul__(self, call: Callable[[], Any]) -> Self:
        self.result = call()
        return self


def main(what: str, num_requests: int, num_steps: int) -> None:
    """Run a warm-up, then the steps, each stored and delivered before the next."""
    torch.set_num_threads(1)
    shape = StageShape(DecodeBatch.num_blocks(num_requests), num_requests)
    stage = OurStage(shape, ThreadingRuntime())
    batch = DecodeBatch(shape, num_requests)
    counted = Counted()

    def maybe_counted(call: Callable[[], Any], *, count: bool) -> Any:
        nonlocal counted
        if not count:
            return call()
        counted @= call
        return counted.result

    for number in range(-WARM_UP_STEPS, num_steps):
        stage.prepare(batch.next_step() if batch.room else batch.restart())
        step_id: int = maybe_counted(stage.run_step, count=what == STEP and number >= 0)
        stage.settle()

        def take(step_id: int = step_id) -> Delivered:
            return stage.deliver(step_id)

        rows: Delivered = maybe_counted(take, count=what == MATERIALIZE and number >= 0)
        rows.release()
    stage.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
