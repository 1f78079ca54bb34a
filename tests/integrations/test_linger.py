# SPDX-License-Identifier: Apache-2.0
"""A thread whose work may wait sleeps once for several pieces of it, and without bound only when there is none."""

import pytest

from omni_core.integrations.vllm.delivery.linger import LINGER_S, Linger


class WrittenDown:
    """A condition that never waits: `arrives` says what is there after each wait."""

    def __init__(self, work, arrives):
        self._work = work
        self._arrives = iter(arrives)
        self.timeouts_s = []

    def wait_for(self, predicate, timeout_s):
        self.timeouts_s.append(timeout_s)
        self._work[:] = next(self._arrives)
        return predicate()


def waits(arrives, *, may_wait):
    work = []
    changed = WrittenDown(work, arrives)
    linger = Linger(changed, has_work=lambda: bool(work), is_due=lambda: len(work) >= 2, may_wait=may_wait)
    linger.wait_for_work()
    return changed.timeouts_s


@pytest.mark.parametrize(
    ("arrives", "timeouts_s"),
    [
        ([[1, 2]], [LINGER_S]),
        ([[1]], [LINGER_S]),
        ([[], [1], [1, 2]], [LINGER_S, None, LINGER_S]),
    ],
    ids=["enough came", "some came", "nothing came for long"],
)
def test_work_that_may_wait_is_waited_for_together(arrives, timeouts_s):
    assert waits(arrives, may_wait=True) == timeouts_s


def test_work_that_may_not_wait_ends_the_first_wait():
    assert waits([[1]], may_wait=False) == [None]
