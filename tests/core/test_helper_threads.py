# SPDX-License-Identifier: Apache-2.0
"""A helper thread that cannot work says so at once to whoever waits for it, and never dies in silence."""

import threading

import pytest
from cache_rig import SHORT_S, more, new
from controlled_runtime import PATIENCE_S, ControlledRuntime
from omni_core_cpu_sim import CpuSimBackend
from row_values import assert_rows

from omni_core.prefix_cache.errors import CacheFailedError, ReadFailedError

NO_DEVICE = "no device for this thread"


class UnboundBackend(CpuSimBackend):
    """`bind_thread` fails on the threads whose names are in `refused`, as selecting a lost device does."""

    def __init__(self, runtime, refused, **options):
        super().__init__(runtime, **options)
        self.refused = {refused}

    def bind_thread(self):
        if threading.current_thread().name in self.refused:
            raise RuntimeError(NO_DEVICE)


@pytest.fixture
def make_unbound(make_rig):
    def make(refused):
        runtime = ControlledRuntime()
        return make_rig(runtime=runtime, backend=UnboundBackend(runtime, refused))

    return make


# Limits of these caches are PATIENCE_S: an answer in time is one that names the cause, not a limit.


def test_a_committer_without_a_device_fails_the_cache_with_the_cause(make_unbound):
    rig = make_unbound("omni-core-committer")
    first = rig.step(new("A", [1]))
    for call in (lambda: rig.take(first), rig.cache.flush, lambda: rig.begin(new("B", [2]))):
        with pytest.raises(CacheFailedError, match=NO_DEVICE) as raised:
            call()
        assert str(raised.value.__cause__) == NO_DEVICE
    rig.assert_nothing_held()
    assert NO_DEVICE in rig.cache.reset().failure_cleared


def test_a_committer_that_gets_its_device_back_serves_after_a_reset(make_unbound):
    rig = make_unbound("omni-core-committer")
    with pytest.raises(CacheFailedError, match=NO_DEVICE):
        rig.run(new("A", [1]))
    rig.cache.reset()
    with pytest.raises(CacheFailedError, match=NO_DEVICE):
        rig.run(new("B", [1]))
    rig.cache.reset()
    rig.backend.refused.clear()
    rig.run(new("D", [1]))
    assert_rows(rig.run(new("C", [1, 2], hit=4))["C"], ("D", 0, 4), ("C", 4, 8))


def test_a_prefetch_thread_without_a_device_fails_the_read_by_name(make_unbound):
    rig = make_unbound("omni-core-prefetch")
    rig.run(new("A", [1]))
    taken = rig.run(new("C", [1, 2], hit=4), new("D", [3]))
    error = taken.failed["C"]
    assert isinstance(error, ReadFailedError)
    assert error.req_id == "C"
    assert NO_DEVICE in str(error)
    assert_rows(taken["D"], ("D", 0, 4))
    # The rows stay owed, and come once the thread can work.
    rig.backend.refused.clear()
    assert_rows(rig.run(more("C", 1, blocks=[4]))["C"], ("A", 0, 4), ("C", 4, 9))
    rig.assert_nothing_held()


@pytest.mark.parametrize("thread", ["omni-core-committer", "omni-core-prefetch"])
def test_a_cache_whose_threads_never_bound_closes(make_unbound, thread):
    rig = make_unbound(thread)
    rig.step(new("A", [1]))
    assert rig.cache.close(PATIENCE_S) is True
    assert not [name for name in rig.runtime.living_threads() if name.startswith("omni-core-")]


def test_closing_under_a_copy_that_was_given_up_is_false_in_time_and_true_later(make_rig):
    rig = make_rig(join_timeout_s=SHORT_S)
    with rig.held():
        rig.step(new("A", [1]))
        with pytest.raises(CacheFailedError, match="not complete"):
            rig.cache.flush(PATIENCE_S)
        # The backend's own limit for closing a stream is 10 s; the caller's is what counts.
        for _ in range(2):
            closer = rig.call("closer", lambda: rig.cache.close(SHORT_S))
            assert closer.result(timeout_s=5) is False
        assert rig.backend.pinned_bytes > 0
    assert rig.cache.close(PATIENCE_S) is True
    assert rig.backend.pinned_bytes == 0
