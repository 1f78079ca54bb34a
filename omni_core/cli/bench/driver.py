# SPDX-License-Identifier: Apache-2.0
"""An engine thread that does nothing but feed one cache, and the fields that every comparison has."""

from __future__ import annotations

import time
from collections.abc import Callable

from omni_core.cli.bench.engine_batch import DecodeBatch
from omni_core.cli.bench.results import MS_PER_S, Row, with_interval
from omni_core.cli.bench.samples import Samples
from omni_core.cli.bench.stage import OURS, OurStage, Stage
from omni_core.cli.bench.threads import Builders, MeteredRuntime

FLOOR = "floor"


class Driver:
    """Decode steps of one side, with builder threads beside the engine thread."""

    def __init__(self, stage: Stage, batch: DecodeBatch, runtime: MeteredRuntime, num_builders: int = 1) -> None:
        self.stage = stage
        self.batch = batch
        self._most_open = batch.shape.staging_depth - 2
        self.builders = Builders(runtime, stage, num_builders)
        self.held_back = 0
        """Steps before which the driver waited for the builders."""
        self.staging_full = 0
        """Steps of ours that began with every staging slot in use all the same: the committer was late."""
        self.engine_cpu_s = 0.0
        """CPU time of the engine thread in its steps."""

    def make_room(self, steps: int) -> None:
        """Start the requests over if their blocks have no room for so many steps; then nothing is under way."""
        if self.batch.room < steps:
            self.stage.prepare(self.batch.restart())
            self.stage.deliver(self.stage.run_step()).release()
        self.stage.settle()

    def run(self, steps: int, took: Callable[[int, float], None]) -> None:
        """So many steps without a pause, then wait until everything is delivered and stored.

        Before a step, and untimed, it waits until the builders have left two staging slots free: builders that get
        behind an engine with no forward at all would otherwise be measured in the engine's place.

        Args:
            steps: how many.
            took: told of each step's number and seconds.
        """
        self.make_room(steps)
        for step in range(steps):
            self.stage.prepare(self.batch.next_step())
            self.held_back += self.builders.wait_for_open(self._most_open)
            if isinstance(self.stage, OurStage):
                self.staging_full += self.stage.stats().staging_slots_in_use >= self.batch.shape.staging_depth
            cpu_s, began = time.thread_time(), time.perf_counter()
            step_id = self.stage.run_step()
            took(step, time.perf_counter() - began)
            self.engine_cpu_s += time.thread_time() - cpu_s
            self.builders.submit(step_id)
        self.builders.wait_for_open(0)
        self.stage.settle()

    def run_at_rest(self, took: Callable[[float], None]) -> int:
        """One step with every other thread idle; its id, still to be delivered."""
        self.make_room(1)
        self.stage.prepare(self.batch.next_step())
        began = time.perf_counter()
        step_id = self.stage.run_step()
        took(time.perf_counter() - began)
        self.stage.settle()
        return step_id

    def forget_counts(self) -> None:
        """Begin to count anew, after a warm-up."""
        self.held_back = self.staging_full = 0
        self.engine_cpu_s = 0.0
        if isinstance(self.stage, OurStage):
            self.stage.layout_s.clear()

    def close(self) -> None:
        """End the builders."""
        self.builders.close()


def comparison(samples: Samples, peer_names: tuple[str, ...]) -> Row:
    """The fields of a call of ours beside its floor and the peer's call, where those were timed."""
    row = with_interval("ours_ms", samples.median_s(OURS), MS_PER_S)
    peers = [name for name in peer_names if samples.count(name)]
    for name in peers:
        row |= with_interval(f"{name}_ms", samples.median_s(name), MS_PER_S)
    if samples.count(FLOOR):
        row |= with_interval("floor_ms", samples.median_s(FLOOR), MS_PER_S)
        row |= with_interval("ratio", samples.ratio(OURS, FLOOR))
    for name in peers:
        row |= with_interval(f"{name}_ratio", samples.ratio(name, OURS))
    return row
