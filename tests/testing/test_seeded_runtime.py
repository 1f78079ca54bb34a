# SPDX-License-Identifier: Apache-2.0
"""The seeded runtime: one thread at a time, virtual time, the same run for the same seed."""

import os
import random
import subprocess
import sys
import textwrap
import time

from omni_core.runtime import ThreadingRuntime
from omni_core.testing.schedule_strategies import LateThreads, RandomChoice, Replayed
from omni_core.testing.seeded_runtime import SeededRuntime

SEEDS = range(40)
AN_HOUR_S = 3600.0


def letters_of(seed, **options):
    """The order in which three threads of eight points each run."""
    order = []
    with SeededRuntime(seed, **options) as runtime:

        def work(letter):
            for _ in range(8):
                order.append(letter)
                runtime.checkpoint("step")

        threads = [runtime.spawn(letter, lambda letter=letter: work(letter)) for letter in "abc"]
        for thread in threads:
            assert thread.join(AN_HOUR_S)
    return "".join(order), runtime


# -- schedules ---------------------------------------------------------------------------------------------------------


def test_a_seed_is_a_schedule_and_seeds_differ():
    orders = [letters_of(seed)[0] for seed in SEEDS]
    assert orders == [letters_of(seed)[0] for seed in SEEDS]
    assert len(set(orders)) > len(SEEDS) / 2
    assert {len(order) for order in orders} == {24}


def test_equal_seeds_have_equal_traces_and_others_do_not():
    first, again, other = (letters_of(seed)[1].trace for seed in (3, 3, 4))
    assert first.digest == again.digest
    assert first.lines() == again.lines()
    assert first.digest != other.digest


DIGEST_OF_A_STAGE = textwrap.dedent("""
    from dataclasses import replace
    from omni_core.testing.seeded_runtime import SeededRuntime
    from omni_core.testing.workload_config import WorkloadConfig
    from omni_core.testing.workloads import run_workload

    config = WorkloadConfig.draw(2)
    config = replace(config, num_requests=8, stage=replace(config.stage, threaded_builder=True))
    with SeededRuntime(11) as runtime:
        run_workload(5, config, runtime=runtime)
    digest = runtime.trace.digest
""")


def test_a_seed_is_the_same_schedule_of_a_whole_stage_in_another_process():
    here = {}
    exec(DIGEST_OF_A_STAGE, here)
    assert here["runtime"].trace.num_choices > 100
    there = subprocess.run(
        [sys.executable, "-c", DIGEST_OF_A_STAGE + "print(digest)"],
        env={**os.environ, "PYTHONHASHSEED": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert there.stdout.strip() == here["digest"]


def test_a_trace_names_thread_and_point_and_gives_the_schedule_to_replay():
    order, runtime = letters_of(7, strategy=RandomChoice(random.Random(7)))
    assert any(line.endswith("→ c") and "a at 'step'" in line for line in runtime.trace.lines())
    replayed, again = letters_of(99, strategy=Replayed(runtime.trace.schedule))
    assert replayed == order
    assert again.trace.digest == runtime.trace.digest


def test_only_one_thread_runs_at_a_time_whatever_the_interpreter_does():
    inside = []
    with SeededRuntime(5) as runtime:

        def work():
            for _ in range(20):
                inside.append(1)
                time.sleep(0)  # where the interpreter would switch
                assert len(inside) == 1
                inside.pop()
                runtime.checkpoint("out")

        for thread in [runtime.spawn(f"worker {number}", work) for number in range(4)]:
            thread.join(AN_HOUR_S)
    assert runtime.thread_errors == {}


def test_a_late_thread_runs_only_when_no_other_can():
    for seed in SEEDS:
        order, _ = letters_of(seed, strategy=LateThreads(random.Random(seed), ("b",)))
        assert order.endswith("b" * 8)


def test_locks_keep_threads_out_and_are_points_of_the_schedule():
    overlaps = 0
    for seed in SEEDS:
        held, meetings = [], []
        with SeededRuntime(seed) as runtime:
            lock = runtime.lock("state")

            def work(name, runtime=runtime, lock=lock, held=held, meetings=meetings):
                for _ in range(3):
                    meetings.append(len(held))
                    with lock:
                        assert held == []
                        held.append(name)
                        runtime.checkpoint("inside")
                        held.remove(name)

            for thread in [runtime.spawn(name, lambda name=name: work(name)) for name in "abc"]:
                thread.join(AN_HOUR_S)
        overlaps += sum(meetings)
    assert overlaps > 0, "no thread ever came to a lock that another one held"


# -- waiting and time --------------------------------------------------------------------------------------------------


def test_time_passes_only_when_every_thread_waits_and_costs_nothing():
    began = time.perf_counter()
    with SeededRuntime(1) as runtime:
        seen = []

        def sleep(seconds):
            runtime.sleep(seconds)
            seen.append((seconds, runtime.monotonic_s()))

        threads = [runtime.spawn(f"{hours} h", lambda hours=hours: sleep(hours * AN_HOUR_S)) for hours in (3, 1, 2)]
        for _ in range(100):
            runtime.checkpoint("busy")
            assert runtime.monotonic_s() == 0
        for thread in threads:
            assert thread.join(10 * AN_HOUR_S)
    assert seen == [(hours * AN_HOUR_S, hours * AN_HOUR_S) for hours in (1, 2, 3)]
    assert time.perf_counter() - began < 60


def outcomes_of_waits(runtime):
    """The same waits on any runtime: what each returned."""
    lock = runtime.lock("box")
    changed = runtime.condition(lock, "changed")
    box, outcomes = [], {}

    def fill():
        for item in range(3):
            with lock:
                box.append(item)
                changed.notify_all()

    def wait(name, predicate, timeout_s):
        with lock:
            outcomes[name] = changed.wait_for(predicate, timeout_s)

    waits = [
        runtime.spawn("true", lambda: wait("true", lambda: True, 0.0)),
        runtime.spawn("full", lambda: wait("full", lambda: len(box) == 3, 30.0)),
        runtime.spawn("never", lambda: wait("never", lambda: False, 0.01)),
        runtime.spawn("idle", lambda: wait("idle", lambda: bool(box), None)),
    ]
    waits.append(runtime.spawn("filler", fill))
    for thread in waits:
        assert thread.join(30.0)
        assert not thread.is_alive()
    return outcomes


def test_waits_end_as_those_of_real_threads_do():
    real = outcomes_of_waits(ThreadingRuntime())
    assert real == {"true": True, "full": True, "never": False, "idle": True}
    for seed in SEEDS:
        with SeededRuntime(seed) as runtime:
            assert outcomes_of_waits(runtime) == real


def test_a_join_gives_up_at_its_time_limit():
    with SeededRuntime(2) as runtime:
        thread = runtime.spawn("slow", lambda: runtime.sleep(10.0))
        assert thread.join(4.0) is False
        assert runtime.monotonic_s() == 4.0
        assert thread.join(AN_HOUR_S) is True
        assert runtime.monotonic_s() == 10.0
