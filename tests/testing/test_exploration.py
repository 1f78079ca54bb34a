# SPDX-License-Identifier: Apache-2.0
"""Exploration finds a planted race, makes it small, and runs it again; what is right it calls right."""

import random
from dataclasses import replace

import pytest

from omni_core.testing import OracleViolationError, SchedulerConfig, StageConfig, WorkloadConfig, hidden_key
from omni_core.testing.exploration import Explorer
from omni_core.testing.schedule_strategies import PLAIN, PassingLateness, Priorities, Replayed, draw_strategy
from omni_core.testing.seeded_errors import StalledError
from omni_core.testing.seeded_runtime import SeededRuntime
from omni_core.testing.watched_workload import run_watched_workload

SEEDS = range(200)
PATIENCE_S = 10.0


class LostUpdateError(AssertionError):
    pass


def count(runtime, size, *, locked):
    """Two threads add 1 `size` times each to one number."""
    total = [0]
    lock = runtime.lock("total")

    def add():
        seen = total[0]
        runtime.checkpoint("between read and write")
        total[0] = seen + 1

    def work():
        for _ in range(size):
            if locked:
                with lock:
                    add()
            else:
                add()

    for thread in [runtime.spawn(name, work) for name in ("one", "other")]:
        thread.join(PATIENCE_S)
    if total[0] != 2 * size:
        raise LostUpdateError(f"{2 * size} additions came to {total[0]}")


def test_what_is_right_fails_in_no_schedule():
    exploration = Explorer(lambda runtime, size: count(runtime, size, locked=True), size=8).explore(SEEDS)
    assert exploration.failure is None
    exploration.check()
    assert exploration.num_runs == len(SEEDS)
    assert exploration.num_schedules > len(SEEDS) / 2
    assert exploration.num_switches > exploration.num_runs


def test_a_lost_update_is_found_shrunk_to_a_switch_or_two_and_run_again():
    explorer = Explorer(lambda runtime, size: count(runtime, size, locked=False), size=16)
    exploration = explorer.explore(SEEDS)
    failure = exploration.failure
    with pytest.raises(LostUpdateError) as caught:
        exploration.check()
    assert any(f"size 16, seed {failure.seed}" in note for note in caught.value.__notes__)
    smallest = explorer.shrink(failure)
    assert smallest.size == 1
    assert len(smallest.schedule.switches) <= 2 < len(failure.trace.schedule.switches)
    assert "at 'between read and write' → " in str(smallest)
    for _ in range(3):
        again = explorer.replay(smallest)
        assert again.trace.digest == smallest.trace.digest
        assert str(again.error) == "2 additions came to 1"
    assert explorer.replay(failure).trace.digest == failure.trace.digest


def test_a_failure_that_is_gone_is_not_replayed():
    broken = [True]
    explorer = Explorer(lambda runtime, size: count(runtime, size, locked=not broken[0]), size=4)
    failure = explorer.explore(SEEDS).failure
    broken.clear()
    broken.append(False)
    assert explorer.replay(failure) is None
    assert explorer.shrink(failure) is failure


def test_a_wake_up_that_some_schedules_lose_is_found_as_a_stall():
    def hand_over(runtime, size):
        lock = runtime.lock("box")
        changed = runtime.condition(lock, "changed")
        box = []

        def fill():
            box.append(1)  # without the lock: the waiter may have looked and not yet gone to sleep
            with lock:
                if not waiting:
                    changed.notify_all()

        waiting = []
        runtime.spawn("filler", fill)
        with lock:
            if not box:
                waiting.append(1)
                runtime.checkpoint("looked")
                changed.wait_for(lambda: len(box) > 1, 60.0)

    exploration = Explorer(hand_over, stall_limit_s=5.0).explore(SEEDS)
    assert isinstance(exploration.failure.error, StalledError)
    assert "'engine' waits for condition 'changed'" in str(exploration.failure)


# -- the real cache, misused -------------------------------------------------------------------------------------------


class ReleasesTooEarly:
    """A consumer's mistake: outputs are released while their rows are still to be read."""

    def __init__(self, cache):
        self._cache = cache

    def materialize(self, step_id, req_ids, sampled_counts=None):
        outputs = self._cache.materialize(step_id, req_ids, sampled_counts)
        outputs.release()
        return outputs

    def __getattr__(self, name):
        return getattr(self._cache, name)


def test_rows_released_while_they_are_read_are_found_by_the_oracle_and_shrunk():
    scheduler = SchedulerConfig(num_blocks=24, block_size=4, max_num_tokens=24, max_num_requests=4)
    config = WorkloadConfig(StageConfig(scheduler, threaded_builder=True), hidden_key(4), ())

    def run(runtime, size):
        run_watched_workload(3, replace(config, num_requests=size), runtime, wrap_cache=ReleasesTooEarly)

    explorer = Explorer(run, size=12, stall_limit_s=5.0)
    exploration = explorer.explore(range(40))
    assert isinstance(exploration.failure.error, OracleViolationError)
    smallest = explorer.shrink(exploration.failure, max_runs=40)
    assert smallest.size < 12
    assert len(smallest.schedule.switches) < len(exploration.failure.trace.schedule.switches)
    assert str(explorer.replay(smallest).error) == str(smallest.error)


# -- strategies --------------------------------------------------------------------------------------------------------


def test_the_plain_schedule_lets_each_thread_run_until_it_waits():
    with SeededRuntime(0, strategy=Replayed(PLAIN)) as runtime:
        count(runtime, 5, locked=False)
    assert [line.split(" ")[1] for line in runtime.trace.lines()] == ["engine", "one"]


@pytest.mark.parametrize(
    "make",
    [
        lambda rng: Priorities(rng, num_changes=3, horizon=100),
        lambda rng: PassingLateness(rng, longest=10),
    ],
    ids=["priorities", "passing lateness"],
)
def test_every_kind_of_strategy_finds_the_lost_update_and_leaves_no_thread_out(make):
    found = 0
    for seed in range(40):
        try:
            with SeededRuntime(seed, strategy=make(random.Random(seed))) as runtime:
                count(runtime, 8, locked=False)
        except LostUpdateError:
            found += 1
    assert found > 0


def test_seeds_draw_every_kind_of_strategy_and_say_which():
    drawn = {type(draw_strategy(seed)).__name__ for seed in range(40)}
    assert drawn == {"LateThreads", "RandomChoice", "Priorities", "PassingLateness"}
    assert str(draw_strategy(7)) == str(draw_strategy(7))
