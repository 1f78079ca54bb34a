# SPDX-License-Identifier: Apache-2.0
"""A write moves along PENDING, QUEUED, COPYING, HOST_READY, WRITTEN, or to FAILED, and in no other way."""

from itertools import pairwise, product

import numpy as np
import pytest
from cache_rig import new

from omni_core.prefix_cache.errors import JoinTimeoutError
from omni_core.prefix_cache.task import TaskState, WriteTask

PATH = [TaskState.PENDING, TaskState.QUEUED, TaskState.COPYING, TaskState.HOST_READY, TaskState.WRITTEN]
LEGAL = {*pairwise(PATH), *((state, TaskState.FAILED) for state in PATH[:-1])}


def task_in(state):
    task = WriteTask("write of step 7", 3, np.arange(4))
    steps = PATH[1 : PATH.index(state) + 1] if state in PATH else [TaskState.FAILED]
    for step in steps:
        task.transition(step)
    assert task.state is state
    return task


@pytest.mark.parametrize(("start", "end"), sorted(LEGAL, key=str))
def test_legal_moves(start, end):
    task = task_in(start)
    task.transition(end)
    assert task.state is end


@pytest.mark.parametrize(("start", "end"), sorted(set(product(TaskState, TaskState)) - LEGAL, key=str))
def test_illegal_moves_are_refused_and_change_nothing(start, end):
    task = task_in(start)
    with pytest.raises(RuntimeError, match=rf"write of step 7 .*illegal move {start.name} -> {end.name}"):
        task.transition(end)
    assert task.state is start


@pytest.mark.parametrize("state", TaskState)
def test_what_a_state_means(state):
    task = task_in(state)
    assert task.host_ready == (state in (TaskState.HOST_READY, TaskState.WRITTEN))
    assert task.done == (state in (TaskState.WRITTEN, TaskState.FAILED))
    assert str(task) == f"write of step 7 (write 3, {state.name})"


def test_the_states_of_a_running_cache(rig):
    """What `flush` names while the write is held at each of its stations."""
    with rig.runtime.stop_at("committer.write") as writing:
        with rig.held():
            rig.step(new("A", [1]))
            rig.step(new("B", [2]))
            rig.wait_until_copying()
            with pytest.raises(JoinTimeoutError, match=r"COPYING.*QUEUED"):
                rig.cache.flush(timeout_s=0.01)
        writing.wait_reached()
        with pytest.raises(JoinTimeoutError, match=r"HOST_READY.*QUEUED"):
            rig.cache.flush(timeout_s=0.01)
    rig.cache.flush()
    assert rig.cache.stats().queued_writes == 0
