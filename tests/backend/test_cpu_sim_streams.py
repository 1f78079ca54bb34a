# SPDX-License-Identifier: Apache-2.0
"""Streams of the simulator: real asynchrony, forced schedules, failures that stay where they belong, bounded ends."""

from __future__ import annotations

import threading
import weakref

import pytest
import torch
from omni_core_cpu_sim import POISON_BYTE, CpuSimBackend

from omni_core.backend import (
    BackendError,
    BackendFeatureUnsupportedError,
    ByteCarver,
    DeviceCopyError,
    DeviceWaitTimeoutError,
    Event,
    Stream,
)
from omni_core.runtime import ThreadingRuntime

WAIT_S = 20.0
SHORT_S = 0.01
WIDTH = 8


def step_rows(request: int, num_tokens: int = 5) -> torch.Tensor:
    """Rows whose value encodes request, position and column."""
    positions = torch.arange(num_tokens).unsqueeze(1)
    return (request * 10_000 + positions * 100 + torch.arange(WIDTH)).to(torch.float32)


class Page:
    """One arena, carved for each copy."""

    def __init__(self, sim: CpuSimBackend, nbytes: int = 1 << 16) -> None:
        self.arena = sim.pinned_arena(nbytes)
        self.carver = ByteCarver(self.arena.buffer)

    def like(self, rows: torch.Tensor) -> torch.Tensor:
        return self.carver.take(rows.shape, rows.dtype)


def close_at_last(closes: CpuSimBackend | Stream) -> None:
    """Close, however short the backend's own `close_timeout_s` is."""
    for _ in range(1000):
        try:
            return closes.close()
        except DeviceWaitTimeoutError as error:
            last_error = error
    raise last_error


def is_unwritten(destination: torch.Tensor) -> bool:
    return bool((destination.view(torch.uint8) == POISON_BYTE).all())


def test_the_caller_goes_on_while_a_copy_is_held(sim: CpuSimBackend) -> None:
    stream, rows = sim.new_stream("copy"), step_rows(1)
    destination = Page(sim).like(rows)
    with sim.copy_gate.hold_copies():
        done = sim.copy_to_host(destination, rows, stream)
        sim.copy_gate.wait_until_waiting(1, WAIT_S)
        assert not done.query()
        assert is_unwritten(destination)
    done.synchronize(WAIT_S)
    assert done.query()
    assert torch.equal(destination, rows)


def test_held_copies_are_let_through_one_by_one_in_order(sim: CpuSimBackend) -> None:
    stream, page = sim.new_stream("copy"), Page(sim)
    sources = [step_rows(request) for request in range(3)]
    destinations = [page.like(rows) for rows in sources]
    with sim.copy_gate.hold_copies():
        events = [
            sim.copy_to_host(destination, rows, stream) for destination, rows in zip(destinations, sources, strict=True)
        ]
        for landed in range(3):
            assert [event.query() for event in events] == [True] * landed + [False] * (3 - landed)
            assert all(is_unwritten(destination) for destination in destinations[landed:])
            sim.copy_gate.let_through(1)
            events[landed].synchronize(WAIT_S)
            assert torch.equal(destinations[landed], sources[landed])


def test_each_stream_brings_one_copy_to_the_gate(sim: CpuSimBackend) -> None:
    page, rows = Page(sim), step_rows(1)
    streams = [sim.new_stream(f"copy-{index}") for index in range(3)]
    with sim.copy_gate.hold_copies():
        events = [sim.copy_to_host(page.like(rows), rows, stream) for stream in streams for _ in range(2)]
        sim.copy_gate.wait_until_waiting(3, WAIT_S)
        assert sim.copy_gate.waiting == 3
        with pytest.raises(DeviceWaitTimeoutError, match=r"3 of 4 copies .* after 0\.01 s .*queue a copy"):
            sim.copy_gate.wait_until_waiting(4, SHORT_S)
    for event in events:
        event.synchronize(WAIT_S)
    assert sim.copy_gate.waiting == 0
    assert sim.copy_gate.admitted == 6


def test_holds_nest_and_release_ends_them_all(sim: CpuSimBackend) -> None:
    stream, page, rows = sim.new_stream("copy"), Page(sim), step_rows(1)
    with sim.copy_gate.hold_copies():
        with sim.copy_gate.hold_copies():
            done = sim.copy_to_host(page.like(rows), rows, stream)
        assert sim.copy_gate.held
        sim.copy_gate.wait_until_waiting(1, WAIT_S)
        assert not done.query()
        sim.copy_gate.release_copies()
        assert not sim.copy_gate.held
        done.synchronize(WAIT_S)
    assert not sim.copy_gate.held


def test_a_released_hold_does_not_end_a_later_one(sim: CpuSimBackend) -> None:
    early = sim.copy_gate.hold_copies()
    with early:
        sim.copy_gate.release_copies()
        late = sim.copy_gate.hold_copies()
        late.__enter__()
    assert sim.copy_gate.held
    late.__exit__(None, None, None)
    assert not sim.copy_gate.held


@pytest.mark.parametrize("count", [0, -1])
def test_letting_no_copy_through_is_refused(sim: CpuSimBackend, count: int) -> None:
    with sim.copy_gate.hold_copies(), pytest.raises(ValueError, match=rf"let_through\({count}\)"):
        sim.copy_gate.let_through(count)


def test_letting_through_what_nobody_holds_is_refused(sim: CpuSimBackend) -> None:
    with pytest.raises(ValueError, match=r"copies must be held \(holds: 0\)"):
        sim.copy_gate.let_through(1)


def test_a_permit_does_not_outlive_its_hold(sim: CpuSimBackend) -> None:
    stream, page, rows = sim.new_stream("copy"), Page(sim), step_rows(1)
    with sim.copy_gate.hold_copies():
        sim.copy_gate.let_through(5)
    with sim.copy_gate.hold_copies():
        done = sim.copy_to_host(page.like(rows), rows, stream)
        sim.copy_gate.wait_until_waiting(1, WAIT_S)
        assert not done.query()


def test_a_failed_copy_fails_at_its_event_and_later_work_goes_on(sim: CpuSimBackend) -> None:
    stream, page, rows = sim.new_stream("d2h"), Page(sim), step_rows(1)
    before, lost, after = page.like(rows), page.like(rows), page.like(rows)
    with sim.copy_gate.hold_copies():
        events = [sim.copy_to_host(before, rows, stream)]
        sim.copy_gate.let_through(1)
        events[0].synchronize(WAIT_S)
        sim.copy_gate.fail_next_copy(OSError("bus error"))
        events += [sim.copy_to_host(lost, rows, stream), sim.copy_to_host(after, rows, stream)]
    events[2].synchronize(WAIT_S)
    assert torch.equal(before, rows)
    assert torch.equal(after, rows)
    assert is_unwritten(lost)
    assert events[0].query()
    assert events[2].query()
    for ask in (events[1].query, lambda: events[1].synchronize(WAIT_S)):
        with pytest.raises(
            DeviceCopyError, match=r"copy of 160 bytes .* stream 'd2h' failed: OSError: bus error"
        ) as it:
            ask()
        assert isinstance(it.value.__cause__, OSError)


def test_a_recorded_event_reports_failures_since_the_last_record_only(sim: CpuSimBackend) -> None:
    stream, page, rows = sim.new_stream("copy"), Page(sim), step_rows(1)
    sim.copy_to_host(page.like(rows), rows, stream)
    clean = stream.record()
    clean.synchronize(WAIT_S)
    sim.copy_gate.fail_next_copy(OSError("first"))
    sim.copy_gate.fail_next_copy(OSError("second"))
    for _ in range(3):
        sim.copy_to_host(page.like(rows), rows, stream)
    dirty, later = stream.record(), stream.record()
    later.synchronize(WAIT_S)
    clean.synchronize(WAIT_S)
    with pytest.raises(DeviceCopyError, match="first"):
        dirty.synchronize(WAIT_S)


def test_a_failed_event_still_orders_another_stream(sim: CpuSimBackend) -> None:
    first, second, page, rows = sim.new_stream("first"), sim.new_stream("second"), Page(sim), step_rows(1)
    destination = page.like(rows)
    sim.copy_gate.fail_next_copy(OSError("lost"))
    lost = sim.copy_to_host(page.like(rows), rows, first)
    second.wait(lost)
    sim.copy_to_host(destination, rows, second).synchronize(WAIT_S)
    assert torch.equal(destination, rows)


def test_a_stream_waits_for_another_without_blocking_the_caller(sim: CpuSimBackend) -> None:
    first, second, page = sim.new_stream("first"), sim.new_stream("second"), Page(sim)
    one, two = step_rows(1), step_rows(2)
    shared = page.like(one)
    with sim.copy_gate.hold_copies():
        first_done = sim.copy_to_host(shared, one, first)
        second.wait(first_done)
        second_done = sim.copy_to_host(shared, two, second)
        sim.copy_gate.wait_until_waiting(1, WAIT_S)
        # The second stream's copy never reaches the gate before the first stream's has passed it.
        sim.copy_gate.let_through(1)
        first_done.synchronize(WAIT_S)
        sim.copy_gate.wait_until_waiting(1, WAIT_S)
        assert torch.equal(shared, one)
        assert not second_done.query()
    second_done.synchronize(WAIT_S)
    assert torch.equal(shared, two)


def test_a_stream_that_waits_for_itself_or_for_finished_work_goes_on(sim: CpuSimBackend) -> None:
    stream, rows = sim.new_stream("copy"), step_rows(1)
    destination = Page(sim).like(rows)
    stream.wait(stream.record())
    stream.wait(sim.current_stream().record())
    sim.copy_to_host(destination, rows, stream).synchronize(WAIT_S)
    assert torch.equal(destination, rows)


def test_the_calling_thread_is_a_stream_whose_work_is_done(sim: CpuSimBackend) -> None:
    current = sim.current_stream()
    event = current.record()
    assert event.query()
    event.synchronize(0.0)
    current.wait(event)
    current.close()
    assert current.record().query()


def test_waiting_on_the_calling_thread_blocks_it_in_bounded_time(make_sim) -> None:
    sim = make_sim(close_timeout_s=SHORT_S)
    stream, page, rows = sim.new_stream("copy"), Page(sim), step_rows(1)
    destination = page.like(rows)
    with sim.copy_gate.hold_copies():
        done = sim.copy_to_host(destination, rows, stream)
        with pytest.raises(DeviceWaitTimeoutError, match="'copy'"):
            sim.current_stream().wait(done)
    done.synchronize(WAIT_S)
    sim.current_stream().wait(done)
    sim.copy_gate.fail_next_copy(OSError("lost"))
    lost = sim.copy_to_host(destination, rows, stream)
    stream.record()
    stream.record().synchronize(WAIT_S)
    sim.current_stream().wait(lost)


def test_a_wait_that_ends_early_says_who_is_stuck_and_why(sim: CpuSimBackend) -> None:
    stream, page, rows = sim.new_stream("d2h"), Page(sim), step_rows(1)
    with sim.copy_gate.hold_copies():
        sim.copy_to_host(page.like(rows), rows, stream)
        done = sim.copy_to_host(page.like(rows), rows, stream)
        with pytest.raises(
            DeviceWaitTimeoutError,
            match=r"event 2 of stream 'd2h': .* timeout_s=0\.01; 2 of 2 queued .* held by backend\.copy_gate",
        ):
            done.synchronize(SHORT_S)
    done.synchronize(WAIT_S)


def test_the_source_is_kept_until_the_copy_is_done_and_no_longer(sim: CpuSimBackend) -> None:
    stream, rows = sim.new_stream("copy"), step_rows(1)
    destination, expected, watched = Page(sim).like(rows), rows.clone(), weakref.ref(rows)
    with sim.copy_gate.hold_copies():
        done = sim.copy_to_host(destination, rows, stream)
        del rows
        assert watched() is not None
    done.synchronize(WAIT_S)
    assert watched() is None
    assert torch.equal(destination, expected)


def test_a_failed_copy_lets_its_source_go_too(sim: CpuSimBackend) -> None:
    stream, rows = sim.new_stream("copy"), step_rows(1)
    destination, watched = Page(sim).like(rows), weakref.ref(rows)
    sim.copy_gate.fail_next_copy(OSError("lost"))
    done = sim.copy_to_host(destination, rows, stream)
    del rows
    with pytest.raises(DeviceCopyError):
        done.synchronize(WAIT_S)
    assert watched() is None


def test_many_threads_share_one_stream(sim: CpuSimBackend) -> None:
    stream, failures = sim.new_stream("shared"), []
    pages = [Page(sim) for _ in range(4)]
    start = threading.Barrier(4)

    def work(worker: int) -> None:
        start.wait(WAIT_S)
        for turn in range(50):
            rows = step_rows(worker * 50 + turn)
            pages[worker].carver.restart()
            destination = pages[worker].like(rows)
            sim.copy_to_host(destination, rows, stream).synchronize(WAIT_S)
            if not torch.equal(destination, rows):
                failures.append((worker, turn))

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert not failures
    assert sim.copy_gate.admitted == 200


def test_gradients_do_not_follow_rows_to_the_host(sim: CpuSimBackend) -> None:
    stream, rows = sim.new_stream("copy"), step_rows(1).requires_grad_()
    destination = Page(sim).like(rows)
    sim.copy_to_host(destination, rows, stream).synchronize(WAIT_S)
    assert torch.equal(destination, rows)
    assert not destination.requires_grad


class TestRefusals:
    """A copy that cannot be right is refused when it is queued, by name, and nothing moves."""

    def refused(self, sim: CpuSimBackend, destination: torch.Tensor, source: torch.Tensor, match: str) -> None:
        with pytest.raises(ValueError, match=match):
            sim.copy_to_host(destination, source, sim.new_stream("copy"))
        assert sim.copy_gate.admitted == 0

    def test_another_shape(self, sim: CpuSimBackend) -> None:
        destination = Page(sim).carver.take((5, WIDTH), torch.float32)
        self.refused(sim, destination, step_rows(1, num_tokens=1), r"destination is \(5, 8\).*source is \(1, 8\)")
        assert is_unwritten(destination)

    def test_another_dtype(self, sim: CpuSimBackend) -> None:
        destination = Page(sim).carver.take((5, WIDTH), torch.float32)
        self.refused(sim, destination, step_rows(1).to(torch.float64), r"float32.*float64")

    def test_a_strided_source(self, sim: CpuSimBackend) -> None:
        destination = Page(sim).carver.take((5, WIDTH), torch.float32)
        self.refused(sim, destination, torch.zeros(WIDTH, 5).T, r"source strides \(1, 5\).*must be contiguous")

    def test_a_strided_destination(self, sim: CpuSimBackend) -> None:
        destination = Page(sim).carver.take((5, 2 * WIDTH), torch.float32)[:, :WIDTH]
        self.refused(sim, destination, step_rows(1), r"destination strides \(16, 1\)")

    def test_a_destination_outside_every_arena(self, sim: CpuSimBackend) -> None:
        self.refused(sim, torch.empty(5, WIDTH), step_rows(1), r"\(5, 8\) torch\.float32 on cpu lies in no live pinned")

    def test_a_destination_in_a_closed_arena(self, sim: CpuSimBackend) -> None:
        page = Page(sim)
        destination = page.like(step_rows(1))
        page.arena.close()
        self.refused(sim, destination, step_rows(1), "lies in no live pinned arena")

    def test_a_destination_in_another_backends_arena(self, sim: CpuSimBackend, make_sim) -> None:
        self.refused(sim, Page(make_sim()).like(step_rows(1)), step_rows(1), "lies in no live pinned arena")

    def test_a_source_on_another_device(self, sim: CpuSimBackend) -> None:
        destination = Page(sim).carver.take((5, WIDTH), torch.float32)
        self.refused(sim, destination, torch.empty(5, WIDTH, device="meta"), "source lies on meta")

    def test_the_calling_thread_as_copy_stream(self, sim: CpuSimBackend) -> None:
        rows = step_rows(1)
        with pytest.raises(BackendFeatureUnsupportedError, match=r"stream 'caller' .* new_stream"):
            sim.copy_to_host(Page(sim).like(rows), rows, sim.current_stream())

    @pytest.mark.parametrize("on", ["caller", "worker"])
    def test_an_event_of_another_kind(self, sim: CpuSimBackend, on: str) -> None:
        class Foreign(Event):
            def query(self) -> bool:
                return True

            def synchronize(self, timeout_s: float) -> None:
                return None

        stream: Stream = sim.current_stream() if on == "caller" else sim.new_stream("worker")
        with pytest.raises(TypeError, match=f"stream '{on}' of cpu_sim cannot wait for a Foreign"):
            stream.wait(Foreign())


class TestClosing:
    def test_a_stream_runs_what_is_queued_and_takes_no_more(self, sim: CpuSimBackend) -> None:
        stream, page, rows = sim.new_stream("copy"), Page(sim), step_rows(1)
        destinations = [page.like(rows) for _ in range(3)]
        events = [sim.copy_to_host(destination, rows, stream) for destination in destinations]
        stream.close()
        stream.close()
        assert all(event.query() for event in events)
        assert all(torch.equal(destination, rows) for destination in destinations)
        for refused in (
            lambda: sim.copy_to_host(destinations[0], rows, stream),
            stream.record,
            lambda: stream.wait(events[0]),
        ):
            with pytest.raises(BackendError, match="stream 'copy' of cpu_sim is closed"):
                refused()

    def test_a_stuck_stream_is_named_and_may_be_closed_again(self, make_sim) -> None:
        sim = make_sim(close_timeout_s=SHORT_S)
        stream, rows = sim.new_stream("d2h"), step_rows(1)
        destination = Page(sim).like(rows)
        with sim.copy_gate.hold_copies():
            done = sim.copy_to_host(destination, rows, stream)
            with pytest.raises(
                DeviceWaitTimeoutError, match=r"'d2h': .* close_timeout_s=0\.01; 1 of 1 queued .*copy_gate"
            ):
                stream.close()
        done.synchronize(WAIT_S)
        close_at_last(stream)
        assert torch.equal(destination, rows)

    def test_closing_the_backend_ends_holds_and_every_worker(self, sim: CpuSimBackend) -> None:
        page, rows = Page(sim), step_rows(1)
        streams = [sim.new_stream(f"closing-{index}") for index in range(2)]
        destinations = [page.like(rows) for _ in streams]
        with sim.copy_gate.hold_copies():
            events = [
                sim.copy_to_host(destination, rows, stream)
                for destination, stream in zip(destinations, streams, strict=True)
            ]
            sim.close()
            assert all(event.query() for event in events)
        assert all(torch.equal(destination, rows) for destination in destinations)
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("cpu_sim-closing-")]

    def test_a_closed_backend_refuses_by_name(self, sim: CpuSimBackend) -> None:
        sim.close()
        sim.close()
        for refused in (
            lambda: sim.new_stream("late"),
            lambda: sim.pinned_arena(64),
            lambda: sim.snapshot_ring(1, 64, torch.device("cpu")),
            sim.copy_gate.hold_copies().__enter__,
        ):
            with pytest.raises(BackendError, match="the cpu_sim backend is closed"):
                refused()

    def test_a_backend_that_is_stuck_says_so_and_keeps_its_memory(self, make_sim) -> None:
        let_go = threading.Event()

        class StuckClock(ThreadingRuntime):
            def sleep(self, seconds: float) -> None:
                let_go.wait(WAIT_S)

        sim = make_sim(StuckClock(), copy_latency_s=1.0, close_timeout_s=SHORT_S)
        rows = step_rows(1)
        page = Page(sim)
        destination = page.like(rows)
        done = sim.copy_to_host(destination, rows, sim.new_stream("d2h"))
        with pytest.raises(DeviceWaitTimeoutError, match=r"cpu_sim backend not closed: stream 'd2h'"):
            sim.close()
        assert sim.pinned_bytes == page.carver.capacity_bytes
        let_go.set()
        done.synchronize(WAIT_S)
        close_at_last(sim)
        assert sim.pinned_bytes == 0
