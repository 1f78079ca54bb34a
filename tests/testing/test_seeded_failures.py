# SPDX-License-Identifier: Apache-2.0
"""What a seeded run says when a schedule goes wrong: deadlocks, stalls, endless loops, threads left over or dead."""

import pytest

from omni_core.runtime import ThreadingRuntime
from omni_core.testing.seeded_errors import (
    DeadlockError,
    MisuseError,
    PointLimitError,
    StalledError,
    UncleanThreadsError,
)
from omni_core.testing.seeded_runtime import SeededRuntime

SEEDS = range(40)
AN_HOUR_S = 3600.0


def run(scenario, seed=1, **options):
    """Run `scenario(runtime)` as the engine thread."""
    with SeededRuntime(seed, **options) as runtime:
        return scenario(runtime)


def wait_forever(runtime, name="never"):
    """What a thread does that waits for something that never comes."""
    lock = runtime.lock(name)
    condition = runtime.condition(lock, name)

    def wait():
        with lock:
            condition.wait_for(lambda: False, None)

    return wait


def take_two_locks_in_both_orders(runtime):
    first, second = runtime.lock("first"), runtime.lock("second")

    def take(outer, inner):
        with outer, inner:
            pass

    one = runtime.spawn("one", lambda: take(first, second))
    other = runtime.spawn("other", lambda: take(second, first))
    assert one.join(AN_HOUR_S)
    assert other.join(AN_HOUR_S)


def test_locks_taken_in_a_circle_are_a_deadlock_that_names_both_threads():
    deadlocks = {}
    for seed in SEEDS:
        try:
            run(take_two_locks_in_both_orders, seed)
        except DeadlockError as error:
            deadlocks[seed] = str(error)
    assert 0 < len(deadlocks) < len(SEEDS), "some schedules lock up and some do not"
    for seed, said in deadlocks.items():
        assert "'one' waits for lock" in said or "'one' could run" in said
        assert "holds 'first'" in said
        assert "holds 'second'" in said
        with pytest.raises(DeadlockError) as again:
            run(take_two_locks_in_both_orders, seed)
        assert str(again.value) == said


def test_a_lock_entered_twice_by_one_thread_is_a_deadlock():
    def enter_twice(runtime):
        lock = runtime.lock("state")
        with lock, lock:
            pass

    with pytest.raises(DeadlockError, match="enters lock 'state', which is held by 'engine'"):
        run(enter_twice)


def test_waiting_for_what_never_comes_is_a_deadlock_that_names_every_thread():
    def wait(runtime):
        runtime.spawn("sleeper", wait_forever(runtime, "morning"))
        wait_forever(runtime, "evening")()

    with pytest.raises(DeadlockError) as caught:
        run(wait)
    assert "'sleeper' waits for condition 'morning' of lock 'morning', holds no lock" in str(caught.value)
    assert "'engine' waits for condition 'evening' of lock 'evening', holds no lock" in str(caught.value)
    assert any("left over" in note and "'sleeper'" in note for note in caught.value.__notes__)


def fill_and_forget_to_tell(runtime):
    lock = runtime.lock("box")
    changed = runtime.condition(lock, "changed")
    box = []

    def fill():
        with lock:
            runtime.sleep(1.0)
            box.append(1)

    with lock:
        runtime.spawn("filler", fill)
        return changed.wait_for(lambda: bool(box), 60.0)


def test_a_lost_wake_up_is_a_stall_where_only_a_time_out_could_help():
    assert run(fill_and_forget_to_tell) is True, "without a limit the time-out hides it"
    with pytest.raises(StalledError, match=r"(?s)more than stall_limit_s=5\.0.*'engine' waits for condition 'changed'"):
        run(fill_and_forget_to_tell, stall_limit_s=5.0)


def test_going_round_in_circles_ends_at_the_point_limit():
    def spin(runtime):
        stop = []

        def go_round():
            while not stop:
                runtime.checkpoint("again")

        thread = runtime.spawn("spinner", go_round)
        try:
            thread.join(AN_HOUR_S)
        finally:
            stop.append(True)

    with pytest.raises(PointLimitError, match="the last one 'again' in thread 'spinner'"):
        run(spin, max_points=5_000)


def test_threads_left_over_are_ended_and_named():
    unwound, runtimes = [], []

    def leave_one_behind(runtime):
        runtimes.append(runtime)

        def wait():
            try:
                wait_forever(runtime)()
            finally:
                unwound.append(True)

        runtime.spawn("stuck", wait)
        runtime.spawn("ends by itself", lambda: runtime.checkpoint("soon"))

    with pytest.raises(UncleanThreadsError, match=r"(?s)left over: .*'stuck' waits for condition 'never'") as caught:
        run(leave_one_behind)
    assert "ends by itself" not in str(caught.value)
    assert unwound == [True]
    assert runtimes[0].living_threads == ()


def test_a_thread_that_swallows_its_end_is_left_alone_and_named():
    def never_end(runtime):
        def swallow():
            while True:
                try:
                    runtime.sleep(1.0)
                except BaseException:
                    continue

        runtime.spawn("stubborn", swallow)

    with pytest.raises(UncleanThreadsError, match="'stubborn' cannot be ended"):
        run(never_end)


def test_a_thread_that_died_is_named_with_its_error():
    def die(runtime):
        def fail():
            raise ValueError("broken")

        assert runtime.spawn("worker", fail).join(AN_HOUR_S)
        assert isinstance(runtime.thread_errors["worker"], ValueError)

    with pytest.raises(UncleanThreadsError, match=r"'worker' died of ValueError\('broken'\)"):
        run(die)


def test_what_the_block_raises_comes_through_with_a_note_about_its_threads():
    def fail(runtime):
        runtime.spawn("stuck", wait_forever(runtime))
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        run(fail)
    assert any("left over" in note for note in caught.value.__notes__)


def test_a_thread_the_runtime_does_not_know_is_refused():
    refused = []

    def call_from_outside(runtime):
        def call():
            try:
                runtime.checkpoint("from outside")
            except MisuseError as error:
                refused.append(str(error))

        assert ThreadingRuntime().spawn("stranger", call).join(30.0)

    run(call_from_outside)
    assert "from outside: called by a thread this seeded runtime does not know" in refused[0]


def test_conditions_are_used_with_their_lock_held_and_locks_left_by_their_owner():
    with SeededRuntime(1) as runtime:
        lock = runtime.lock("box")
        condition = runtime.condition(lock, "changed")
        for call in (condition.notify_all, lambda: condition.wait_for(lambda: False, 1.0)):
            with pytest.raises(MisuseError, match="does not hold the lock"):
                call()
        with pytest.raises(MisuseError, match="does not hold it"):
            lock.__exit__(None, None, None)
        foreign = ThreadingRuntime().lock("foreign")
        with pytest.raises(TypeError, match=r"needs a lock of SeededRuntime\.lock"):
            runtime.condition(foreign, "changed")


def test_after_close_calls_return_at_once_and_no_thread_can_be_started():
    with SeededRuntime(1) as runtime:
        lock = runtime.lock("box")
        condition = runtime.condition(lock, "changed")
        thread = runtime.spawn("short", lambda: None)
    with lock:
        condition.notify_all()
        assert condition.wait_for(lambda: False, 60.0) is False
    runtime.sleep(5.0)
    runtime.checkpoint("late")
    assert thread.join(60.0) is True
    assert runtime.close() == ""
    with pytest.raises(MisuseError, match="is closed"):
        runtime.spawn("late", lambda: None)


def test_around_thread_is_entered_on_every_thread_and_on_the_engine():
    entered = []

    class Around:
        def __enter__(self):
            entered.append("in")

        def __exit__(self, *exc_info):
            entered.append("out")

    def spawn_one(runtime):
        runtime.spawn("worker", lambda: runtime.checkpoint("here")).join(AN_HOUR_S)
        assert entered == ["in", "in", "out"]

    run(spawn_one, around_thread=Around)
    assert entered == ["in", "in", "out", "out"]
