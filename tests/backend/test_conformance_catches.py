# SPDX-License-Identifier: Apache-2.0
"""The suite is worth something only if a broken backend fails it. Each backend here breaks one promise."""

from __future__ import annotations

import threading
import unittest
import weakref

import pytest
import torch
from omni_core_cpu_sim import CpuSimBackend

from omni_core.backend import (
    ByteCarver,
    DeviceBackend,
    DeviceWaitTimeoutError,
    Event,
    PinnedArena,
    SnapshotRing,
    Stream,
)
from omni_core.backend.conformance import (
    CONFORMANCE_CHECKS,
    BackendConformance,
    ConformanceCheck,
    run_conformance,
)
from omni_core.backend.conformance.rig import Rig
from omni_core.runtime import ThreadingRuntime


class _WrappedEvent(Event):
    def __init__(self, inner: Event) -> None:
        self.inner = inner

    def query(self) -> bool:
        return self.inner.query()

    def synchronize(self, timeout_s: float) -> None:
        self.inner.synchronize(timeout_s)


class _WrappedStream(Stream):
    def __init__(self, inner: Stream) -> None:
        self.inner = inner

    @property
    def name(self) -> str:
        return self.inner.name

    def record(self) -> Event:
        return self.inner.record()

    def wait(self, event: Event) -> None:
        self.inner.wait(event)

    def close(self) -> None:
        self.inner.close()


class EventsCompleteTooEarly(CpuSimBackend):
    def copy_to_host(self, destination: torch.Tensor, source: torch.Tensor, stream: Stream) -> Event:
        class Early(_WrappedEvent):
            def query(self) -> bool:
                return True

        return Early(super().copy_to_host(destination, source, stream))


class SynchronizeDoesNotWait(CpuSimBackend):
    def copy_to_host(self, destination: torch.Tensor, source: torch.Tensor, stream: Stream) -> Event:
        class Hasty(_WrappedEvent):
            def synchronize(self, timeout_s: float) -> None:
                return None

        return Hasty(super().copy_to_host(destination, source, stream))


class TimeoutsAreSwallowed(CpuSimBackend):
    def copy_to_host(self, destination: torch.Tensor, source: torch.Tensor, stream: Stream) -> Event:
        class Silent(_WrappedEvent):
            def synchronize(self, timeout_s: float) -> None:
                try:
                    self.inner.synchronize(timeout_s)
                except DeviceWaitTimeoutError:
                    return

        return Silent(super().copy_to_host(destination, source, stream))


class TimeoutsAreNotExplained(CpuSimBackend):
    def copy_to_host(self, destination: torch.Tensor, source: torch.Tensor, stream: Stream) -> Event:
        class Terse(_WrappedEvent):
            def synchronize(self, timeout_s: float) -> None:
                try:
                    self.inner.synchronize(timeout_s)
                except DeviceWaitTimeoutError:
                    raise DeviceWaitTimeoutError("timed out") from None

        return Terse(super().copy_to_host(destination, source, stream))


class SnapshotIsAnAlias(CpuSimBackend):
    def snapshot(self, tensor: torch.Tensor, carver: ByteCarver) -> torch.Tensor:
        return tensor


class SourceIsForgotten(CpuSimBackend):
    def copy_to_host(self, destination: torch.Tensor, source: torch.Tensor, stream: Stream) -> Event:
        reference = weakref.ref(source)

        class Forgetful(_WrappedEvent):
            def synchronize(self, timeout_s: float) -> None:
                kept = reference()
                if kept is not None:
                    destination.copy_(kept)

        return Forgetful(stream.record())


class StreamWaitIsIgnored(CpuSimBackend):
    def __init__(self, runtime: ThreadingRuntime) -> None:
        # The copy that must be waited for takes far longer than the one that must wait.
        super().__init__(runtime, copy_bandwidth_bytes_per_s=20e6)

    def new_stream(self, name: str) -> Stream:
        class Deaf(_WrappedStream):
            def wait(self, event: Event) -> None:
                return None

        return Deaf(super().new_stream(name))

    def copy_to_host(self, destination: torch.Tensor, source: torch.Tensor, stream: Stream) -> Event:
        assert isinstance(stream, _WrappedStream)
        return super().copy_to_host(destination, source, stream.inner)


class CloseDropsQueuedWork(CpuSimBackend):
    """Its streams are closed without anyone looking at what they still hold."""

    def new_stream(self, name: str) -> Stream:
        class Dropping(_WrappedStream):
            def close(self) -> None:
                return None

        return Dropping(super().new_stream(name))

    def copy_to_host(self, destination: torch.Tensor, source: torch.Tensor, stream: Stream) -> Event:
        class Dropped(_WrappedEvent):
            def synchronize(self, timeout_s: float) -> None:
                return None

        assert isinstance(stream, _WrappedStream)
        return Dropped(stream.record())


class ArenaStaysOnTheBooks(CpuSimBackend):
    def pinned_arena(self, nbytes: int, *, chunk_bytes: int = 0) -> PinnedArena:
        inner = super().pinned_arena(nbytes)

        class Leaking(PinnedArena):
            closed = False

            @property
            def buffer(self) -> torch.Tensor:
                return inner.buffer

            @property
            def pinned_bytes(self) -> int:
                return nbytes if self.closed else 0

            def close(self) -> None:
                self.closed = True
                inner.close()

        return Leaking()


class PiecesAreWhole(CpuSimBackend):
    def pinned_arena(self, nbytes: int, *, chunk_bytes: int = 0) -> PinnedArena:
        return super().pinned_arena(nbytes if chunk_bytes == 0 else -(-nbytes // chunk_bytes) * chunk_bytes)


class ClaimsPinnedMemoryItHasNot(CpuSimBackend):
    def __init__(self, runtime: ThreadingRuntime) -> None:
        super().__init__(runtime, report_arenas_as_pinned=True)


class RingSlotIsNotRestarted(CpuSimBackend):
    def snapshot_ring(self, depth: int, nbytes: int, device: torch.device) -> SnapshotRing:
        inner = super().snapshot_ring(depth, 2 * nbytes, device)
        carvers = [ByteCarver(torch.empty(2 * nbytes, dtype=torch.uint8)) for _ in range(depth)]

        class Worn(SnapshotRing):
            def slot(self, index: int) -> ByteCarver:
                return carvers[index]

            @property
            def device_bytes(self) -> int:
                return inner.device_bytes

            def close(self) -> None:
                inner.close()

        return Worn()


class CopiesAreBroadcast(CpuSimBackend):
    def copy_to_host(self, destination: torch.Tensor, source: torch.Tensor, stream: Stream) -> Event:
        fitting = source.to(destination.dtype).expand(destination.shape).contiguous()
        return super().copy_to_host(destination, fitting, stream)


class RefusedMemoryIsNotExplained(CpuSimBackend):
    def pinned_arena(self, nbytes: int, *, chunk_bytes: int = 0) -> PinnedArena:
        try:
            return super().pinned_arena(nbytes)
        except MemoryError:
            raise MemoryError from None


class OwnsForeignTensors(CpuSimBackend):
    def owns(self, tensor: torch.Tensor) -> bool:
        return True


def check_named(name: str) -> ConformanceCheck:
    return next(check for check in CONFORMANCE_CHECKS if check.name == name)


@pytest.mark.parametrize(
    ("broken", "check_name", "explanation"),
    [
        (EventsCompleteTooEarly, "events_are_never_early", r"query\(\) of a stalled copy's event is True"),
        (EventsCompleteTooEarly, "queueing_never_blocks", "complete when copy_to_host returned"),
        (SynchronizeDoesNotWait, "waits_are_bounded_and_explained", "must raise DeviceWaitTimeoutError"),
        (TimeoutsAreSwallowed, "waits_are_bounded_and_explained", "must raise DeviceWaitTimeoutError"),
        (TimeoutsAreNotExplained, "waits_are_bounded_and_explained", "must name the stream"),
        (SnapshotIsAnAlias, "overwriting_the_source_after_snapshot_is_harmless", "elements differ"),
        (SnapshotIsAnAlias, "strided_rows_are_snapshotted", "not contiguous"),
        (SourceIsForgotten, "dropping_the_source_after_queueing_is_harmless", "elements differ"),
        (StreamWaitIsIgnored, "wait_orders_two_streams", "waits for an event that is not"),
        (CloseDropsQueuedWork, "closing_runs_what_is_queued", "elements differ"),
        (ArenaStaysOnTheBooks, "arenas_are_accounted", r"after close\(\)"),
        (PiecesAreWhole, "an_arena_in_pieces_is_one_range", "in pieces has"),
        (ClaimsPinnedMemoryItHasNot, "arenas_are_accounted", "is_pinned"),
        (RingSlotIsNotRestarted, "ring_and_arena_mirror_each_other", "bytes"),
        (CopiesAreBroadcast, "unequal_copies_are_refused", "was accepted"),
        (RefusedMemoryIsNotExplained, "refused_memory_is_explained", "must name the size"),
        (OwnsForeignTensors, "describes_itself", "'meta'"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_a_broken_promise_fails_its_check(broken: type[CpuSimBackend], check_name: str, explanation: str) -> None:
    with pytest.raises(AssertionError, match=explanation) as caught:
        check_named(check_name).run(broken)
    assert check_name in "".join(caught.value.__notes__)


def test_a_report_has_one_line_per_check_and_goes_on_after_a_failure() -> None:
    names = ("describes_itself", "refused_memory_is_explained", "rows_arrive_unchanged")
    results = run_conformance(RefusedMemoryIsNotExplained, [check_named(name) for name in names])
    assert [(result.check.name, result.passed) for result in results] == [
        ("describes_itself", True),
        ("refused_memory_is_explained", False),
        ("rows_arrive_unchanged", True),
    ]
    assert "must name the size" in str(results[1].error)


def test_every_check_states_its_requirement_under_a_name_of_its_own() -> None:
    assert len({check.name for check in CONFORMANCE_CHECKS}) == len(CONFORMANCE_CHECKS)
    for check in CONFORMANCE_CHECKS:
        assert check.requirement.endswith("."), check.name


def test_a_check_that_hangs_is_a_failed_check() -> None:
    let_go = threading.Event()

    def hang(rig: Rig) -> None:
        let_go.wait(30)

    hanging = ConformanceCheck("hangs", "It ends.", hang)
    with pytest.raises(AssertionError, match=r"hangs: did not end within 0\.05 s"):
        hanging.run(CpuSimBackend, limit_s=0.05)
    let_go.set()


def test_a_backend_that_cannot_be_made_is_reported_not_raised() -> None:
    def refuse(runtime: ThreadingRuntime) -> DeviceBackend:
        raise RuntimeError("no such device")

    results = run_conformance(refuse)
    assert len(results) == len(CONFORMANCE_CHECKS)
    assert all("no such device" in str(result.error) for result in results)


def test_a_machine_without_the_device_skips() -> None:
    class Absent(BackendConformance):
        backend_name = "absent"

        def skip_reason(self) -> str | None:
            return "no such device here"

    with pytest.raises(unittest.SkipTest, match="no such device here"):
        Absent().test_conformance(CONFORMANCE_CHECKS[0])
