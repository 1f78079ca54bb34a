# SPDX-License-Identifier: Apache-2.0
"""The production runtime keeps the promises the rest of the library is written against."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from omni_core.runtime import ThreadingRuntime

WAIT_S = 20.0
SHORT_S = 0.01


@pytest.fixture
def runtime() -> ThreadingRuntime:
    return ThreadingRuntime()


def test_a_lock_lets_one_thread_in_at_a_time(runtime: ThreadingRuntime) -> None:
    lock, entered = runtime.lock("tables"), threading.Event()

    def enter() -> None:
        with lock:
            entered.set()

    with lock:
        thread = runtime.spawn("second", enter)
        assert not thread.join(SHORT_S)
        assert not entered.is_set()
    assert thread.join(WAIT_S)
    assert entered.is_set()


def test_a_lock_is_given_back_by_a_block_that_raises(runtime: ThreadingRuntime) -> None:
    lock = runtime.lock("tables")
    with pytest.raises(KeyError), lock:
        raise KeyError
    with lock:
        pass


def test_a_waiter_is_woken_when_its_predicate_holds(runtime: ThreadingRuntime) -> None:
    lock = runtime.lock("tables")
    condition = runtime.condition(lock, "tables.changed")
    state = {"rows": 0}
    outcomes: list[bool] = []

    def wait() -> None:
        with lock:
            outcomes.append(condition.wait_for(lambda: state["rows"] == 2, WAIT_S))

    thread = runtime.spawn("waiter", wait)
    for _ in range(2):
        # Taking the lock at all proves that the waiter gave it up.
        with lock:
            state["rows"] += 1
            condition.notify_all()
    assert thread.join(WAIT_S)
    assert outcomes == [True]


def test_every_waiter_is_woken(runtime: ThreadingRuntime) -> None:
    lock = runtime.lock("tables")
    condition = runtime.condition(lock, "tables.changed")
    go: list[int] = []
    woken: list[int] = []

    def wait(number: int) -> None:
        with lock:
            if condition.wait_for(lambda: bool(go), WAIT_S):
                woken.append(number)

    threads = [runtime.spawn(f"waiter-{number}", lambda number=number: wait(number)) for number in range(3)]
    with lock:
        go.append(1)
        condition.notify_all()
    assert all(thread.join(WAIT_S) for thread in threads)
    assert sorted(woken) == [0, 1, 2]


def test_a_wait_ends_when_its_time_is_over(runtime: ThreadingRuntime) -> None:
    lock = runtime.lock("tables")
    condition = runtime.condition(lock, "tables.changed")
    with lock:
        assert not condition.wait_for(lambda: False, SHORT_S)
        assert condition.wait_for(lambda: True, 0.0)


def test_a_condition_needs_a_lock_of_this_runtime(runtime: ThreadingRuntime) -> None:
    with pytest.raises(TypeError, match=r"condition 'tables\.changed' needs a lock of .*, got RLock"):
        runtime.condition(threading.RLock(), "tables.changed")


def test_a_thread_has_its_name_and_ends(runtime: ThreadingRuntime) -> None:
    let_go, names = threading.Event(), []

    def body() -> None:
        let_go.wait(WAIT_S)
        names.append(threading.current_thread().name)

    thread = runtime.spawn("omni-core-committer", body)
    assert thread.name == "omni-core-committer"
    assert thread.is_alive()
    assert not thread.join(SHORT_S)
    let_go.set()
    assert thread.join(WAIT_S)
    assert not thread.is_alive()
    assert thread.join(0.0)
    assert names == ["omni-core-committer"]


def test_a_thread_that_never_ends_does_not_keep_the_process(runtime: ThreadingRuntime) -> None:
    program = (
        "import threading\n"
        "from omni_core.runtime import ThreadingRuntime\n"
        "ThreadingRuntime().spawn('endless', threading.Event().wait)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=WAIT_S)


def test_the_clock_never_goes_back_and_a_sleep_moves_it(runtime: ThreadingRuntime) -> None:
    before_s = runtime.monotonic_s()
    runtime.sleep(SHORT_S)
    after_s = runtime.monotonic_s()
    assert after_s >= before_s + SHORT_S
    assert runtime.monotonic_s() >= after_s


def test_a_checkpoint_does_nothing(runtime: ThreadingRuntime) -> None:
    assert runtime.checkpoint("pool.before_write") is None
