# SPDX-License-Identifier: Apache-2.0
"""The hazard checker finds each kind in a small program that has it, names both sides, and blames no right one."""

import random
from contextlib import contextmanager

import pytest
import torch
from omni_core_cpu_sim import CpuSimBackend

from omni_core.backend import Event
from omni_core.runtime import ThreadingRuntime
from omni_core.testing.hazard_checker import STATE_LOCK, HazardChecker
from omni_core.testing.hazards import HazardError, HazardKind
from omni_core.testing.schedule_strategies import LateThreads
from omni_core.testing.seeded_runtime import SeededRuntime

SEEDS = range(30)
PAGE_BYTES = 256
WAIT_S = 10.0


class Bench:
    """A watched backend with one stream, a device buffer, and a pinned page."""

    def __init__(self, checker, make_backend=CpuSimBackend, bytes_per_s=0):
        self.checker = checker
        self.runtime = checker.runtime
        self.backend = make_backend(
            checker.runtime, observer=checker.device, copy_parts=2, copy_bandwidth_bytes_per_s=bytes_per_s
        )
        self.stream = self.backend.new_stream("copies")
        self.device = torch.arange(PAGE_BYTES, dtype=torch.uint8)
        self.page = self.backend.pinned_arena(PAGE_BYTES).buffer

    def copy(self, stop=PAGE_BYTES):
        """Queue a copy of the first bytes of the device buffer into the page."""
        return self.backend.copy_to_host(self.page[:stop], self.device[:stop], self.stream)


@contextmanager
def bench(seed=0, *, strategy=None, **options):
    with SeededRuntime(seed, strategy=strategy) as seeded, HazardChecker(seeded) as checker:
        it = Bench(checker, **options)
        try:
            yield it
        finally:
            it.backend.close()


def late_device():
    """A schedule in which no copy runs before everyone waits for it."""
    return LateThreads(random.Random(0), ("cpu_sim",))


def found_in(use, **options):
    """The hazards of `use(bench)`."""
    with pytest.raises(HazardError) as caught, bench(**options) as it:
        use(it)
    return caught.value.hazards


def only(hazards, kind):
    assert {hazard.kind for hazard in hazards} == {kind}, hazards
    return hazards[0]


# -- copies ------------------------------------------------------------------------------------------------------------


def read_at_once(it):
    it.copy()
    return it.page.clone()


def test_a_read_before_the_copy_is_complete_names_reader_and_copy():
    hazard = only(found_in(read_at_once, strategy=late_device()), HazardKind.READ_BEFORE_COPY)
    assert "thread 'engine'" in hazard.acting.thread
    assert hazard.acting.doing == "aten::clone"
    assert hazard.acting.memory.nbytes == PAGE_BYTES
    assert "thread 'engine'" in hazard.other.thread
    assert hazard.other.doing == f"queued copy 0 of stream 'copies' ({PAGE_BYTES} bytes), not begun"


def test_a_half_made_copy_is_told_with_the_bytes_that_moved():
    def read_between_the_parts(it):
        it.copy()
        it.runtime.sleep(1.5)
        it.page.clone()

    hazard = only(found_in(read_between_the_parts, bytes_per_s=PAGE_BYTES // 2), HazardKind.READ_BEFORE_COPY)
    assert hazard.other.doing.endswith(f"{PAGE_BYTES // 2} bytes moved")


def test_another_part_of_a_page_may_be_read_while_a_copy_runs():
    with bench(strategy=late_device()) as it:
        it.copy(stop=PAGE_BYTES // 2)
        it.page[PAGE_BYTES // 2 :].clone()
        assert it.checker.num_accesses > 0


def test_a_device_buffer_overwritten_before_its_copy_ran_names_writer_and_copy():
    def overwrite(it):
        it.copy()
        it.device.fill_(7)

    hazard = only(found_in(overwrite, strategy=late_device()), HazardKind.SOURCE_OVERWRITTEN)
    assert hazard.acting.doing == "aten::fill_.Scalar"
    assert "copy 0 of stream 'copies'" in hazard.other.doing


def test_a_page_written_while_a_copy_into_it_runs_is_told():
    def write(it):
        it.copy()
        it.page.zero_()

    hazard = only(found_in(write, strategy=late_device()), HazardKind.WRITE_BEFORE_COPY)
    assert hazard.acting.doing == "aten::zero_"


def test_a_copy_whose_stream_did_not_wait_for_the_producers_is_told():
    def two_streams(it, *, wait):
        compute = it.backend.new_stream("compute")
        made = compute.queue_copy(it.device, torch.ones(PAGE_BYTES, dtype=torch.uint8))
        if wait:
            it.stream.wait(made)
        it.copy().synchronize(WAIT_S)
        assert it.page.tolist() == [1] * PAGE_BYTES or not wait

    for seed in SEEDS:
        with bench(seed) as it:
            two_streams(it, wait=True)
    hazards = found_in(
        lambda it: two_streams(it, wait=False), strategy=LateThreads(random.Random(0), ("cpu_sim-compute",))
    )
    # Both copies run into one buffer: the late one also overwrites what the early one read.
    assert HazardKind.READ_BEFORE_COPY in {hazard.kind for hazard in hazards}
    assert "stream 'compute'" in hazards[0].other.doing
    assert "stream 'copies'" in hazards[0].acting.doing


def test_whoever_waits_for_the_event_is_never_blamed():
    for seed in SEEDS:
        with bench(seed) as it:
            it.copy().synchronize(WAIT_S)
            assert it.page.tolist() == list(range(PAGE_BYTES))
            it.device.fill_(seed)
            refilled = it.copy()
            while not refilled.query():
                it.runtime.sleep(0.01)
            assert it.page.tolist() == [seed] * PAGE_BYTES


# -- events ------------------------------------------------------------------------------------------------------------


class PooledEvent(Event):
    """An event as a device's own library has it: made first and recorded later, and complete until then."""

    def __init__(self, observer):
        self._observer = observer
        self._recorded = None

    def record(self, event):
        self._recorded = event
        self._observer.event_recorded(self)

    def query(self):
        self._observer.event_queried(self)
        return self._recorded is None or self._recorded.query()

    def synchronize(self, timeout_s):
        self._observer.event_waited(self, "")
        if self._recorded is not None:
            self._recorded.synchronize(timeout_s)


class PooledEvents(CpuSimBackend):
    """A backend whose author pools events."""

    records = True

    def __init__(self, runtime, *, observer, **options):
        super().__init__(runtime, observer=observer, **options)
        self._watcher = observer

    def copy_to_host(self, destination, source, stream):
        event = PooledEvent(self._watcher)
        queued = super().copy_to_host(destination, source, stream)
        if self.records:
            event.record(queued)
        return event


class ForgottenRecords(PooledEvents):
    records = False


def test_a_wait_on_an_event_that_was_never_recorded_names_waiter_and_event():
    def wait(it):
        it.copy().synchronize(WAIT_S)

    hazard = only(found_in(wait, make_backend=ForgottenRecords), HazardKind.EVENT_NOT_RECORDED)
    assert "thread 'engine'" in hazard.acting.thread
    assert hazard.acting.doing == "waits for it"
    assert "PooledEvent, never recorded" in hazard.other.doing
    asked = only(found_in(lambda it: it.copy().query(), make_backend=ForgottenRecords), HazardKind.EVENT_NOT_RECORDED)
    assert asked.acting.doing == "asks after it"
    with bench(make_backend=PooledEvents) as it:
        wait(it)


# -- the state lock ----------------------------------------------------------------------------------------------------


def torch_under_lock(it):
    with it.runtime.lock(STATE_LOCK):
        torch.zeros(2)


def sleep_under_lock(it):
    with it.runtime.lock(STATE_LOCK):
        it.runtime.sleep(1.0)


def second_lock_under_lock(it):
    with it.runtime.lock(STATE_LOCK), it.runtime.lock("other"):
        pass


def join_under_lock(it):
    thread = it.runtime.spawn("short", lambda: None)
    with it.runtime.lock(STATE_LOCK):
        thread.join(WAIT_S)


def event_under_lock(it):
    event = it.copy()
    with it.runtime.lock(STATE_LOCK):
        event.synchronize(WAIT_S)


def arena_under_lock(it):
    with it.runtime.lock(STATE_LOCK):
        it.backend.pinned_arena(64)


@pytest.mark.parametrize(
    ("use", "kind", "doing"),
    [
        (torch_under_lock, HazardKind.TORCH_UNDER_LOCK, "aten::zeros"),
        (sleep_under_lock, HazardKind.WAIT_UNDER_LOCK, "sleeps 1 s"),
        (second_lock_under_lock, HazardKind.WAIT_UNDER_LOCK, "enters lock 'other'"),
        (join_under_lock, HazardKind.WAIT_UNDER_LOCK, "joins thread 'short'"),
        (event_under_lock, HazardKind.WAIT_UNDER_LOCK, "enters lock 'cpu_sim.stream.copies'"),
        (arena_under_lock, HazardKind.ALLOCATION_UNDER_LOCK, "allocates a pinned arena of 64 bytes"),
    ],
)
def test_what_the_holder_of_the_state_lock_may_not_do_names_it_and_the_lock(use, kind, doing):
    hazards = found_in(use, strategy=late_device())
    blamed = next(hazard for hazard in hazards if hazard.kind is kind)
    assert blamed.acting.doing == doing
    assert "'engine'" in blamed.acting.thread
    assert f"holds lock '{STATE_LOCK}'" in blamed.other.doing


def test_waiting_on_a_condition_of_the_state_lock_is_what_it_is_for():
    with bench() as it:
        lock = it.runtime.lock(STATE_LOCK)
        condition = it.runtime.condition(lock, "progress")
        with lock:
            assert condition.wait_for(lambda: False, 5.0) is False
        with it.runtime.lock("another"):
            torch.zeros(2)


# -- the checker itself ------------------------------------------------------------------------------------------------


def test_an_error_of_the_block_is_the_cause_of_what_was_found():
    def fail(it):
        torch_under_lock(it)
        raise KeyError("mine")

    with pytest.raises(HazardError) as caught, bench() as it:
        fail(it)
    assert isinstance(caught.value.__cause__, KeyError)


def test_hazards_found_so_far_can_be_asked_for():
    def ask(it):
        it.checker.check()
        torch_under_lock(it)
        with pytest.raises(HazardError, match="1 hazards"):
            it.checker.check()

    assert len(found_in(ask)) == 1


def test_real_threads_are_watched_too():
    def read_held_copy():
        with HazardChecker(ThreadingRuntime()) as checker:
            it = Bench(checker)
            with it.backend.hold_copies():
                read_at_once(it)
            it.backend.close()

    with pytest.raises(HazardError) as caught:
        read_held_copy()
    assert caught.value.kinds == {HazardKind.READ_BEFORE_COPY}
