# SPDX-License-Identifier: Apache-2.0
"""The simulator tells its observer what happens, in order, and lets it make things fail."""

import pytest
import torch
from omni_core_cpu_sim import CpuSimBackend

from omni_core.backend import DeviceCopyError
from omni_core.backend.observer import ByteRange, DeviceObserver
from omni_core.testing.seeded_runtime import SeededRuntime

NBYTES = 96
WAIT_S = 10.0


class Diary(DeviceObserver):
    """Writes down what it hears; `fail` maps a method's name to what it then raises."""

    def __init__(self, **fail):
        self.entries = []
        self._fail = fail

    def _note(self, name, *details):
        self.entries.append((name, *details))
        if name in self._fail:
            raise self._fail[name]

    def thread_bound(self):
        self._note("bound")

    def arena_wanted(self, nbytes):
        self._note("arena_wanted", nbytes)

    def ring_wanted(self, nbytes):
        self._note("ring_wanted", nbytes)

    def arena_made(self, memory):
        self._note("arena_made", memory.nbytes)

    def arena_closed(self, memory):
        self._note("arena_closed", memory.nbytes)

    def copy_queued(self, copy):
        self._note("queued", copy.number, copy.stream, copy.source.nbytes)

    def copy_begins(self, copy):
        self._note("begins", copy.number)

    def part_moved(self, copy, moved_bytes):
        self._note("moved", copy.number, moved_bytes)

    def copy_ended(self, copy, failure):
        self._note("ended", copy.number, failure)

    def event_recorded(self, event):
        self._note("recorded", event)

    def event_queried(self, event):
        self._note("queried", event)

    def event_waited(self, event, waiter):
        self._note("waited", event, waiter)


@pytest.fixture
def runtime():
    with SeededRuntime(0) as runtime:
        yield runtime


def copy_and_wait(backend):
    arena = backend.pinned_arena(NBYTES)
    stream = backend.new_stream("copies")
    source = torch.arange(NBYTES, dtype=torch.uint8)
    event = backend.copy_to_host(arena.buffer, source, stream)
    try:
        event.synchronize(WAIT_S)
        return event, arena.buffer.clone()
    finally:
        arena.close()
        backend.close()


def test_a_copy_is_told_from_its_queue_to_its_end(runtime):
    diary = Diary()
    event, copied = copy_and_wait(CpuSimBackend(runtime, observer=diary, copy_parts=3))
    assert copied.tolist() == list(range(NBYTES))
    told = [entry for entry in diary.entries if entry[0] not in ("waited", "bound")]
    assert told == [
        ("arena_wanted", NBYTES),
        ("arena_made", NBYTES),
        ("queued", 0, "copies", NBYTES),
        ("recorded", event),
        ("begins", 0),
        ("moved", 0, 32),
        ("moved", 0, 64),
        ("moved", 0, 96),
        ("ended", 0, None),
        ("arena_closed", NBYTES),
    ]
    assert ("waited", event, "") in diary.entries


def test_events_are_told_when_recorded_asked_for_and_waited_for_by_threads_and_streams(runtime):
    diary = Diary()
    backend = CpuSimBackend(runtime, observer=diary)
    first, second = backend.new_stream("first"), backend.new_stream("second")
    event = first.record()
    second.wait(event)
    event.query()
    backend.bind_thread()
    backend.close()
    assert diary.entries == [
        ("recorded", event),
        ("waited", event, "second"),
        ("queried", event),
        ("bound",),
    ]


def test_what_the_observer_raises_makes_a_copy_fail_and_moves_nothing(runtime):
    refused = RuntimeError("not this one")
    diary = Diary(begins=refused)
    backend = CpuSimBackend(runtime, observer=diary)
    with pytest.raises(DeviceCopyError, match="not this one"):
        copy_and_wait(backend)
    assert ("ended", 0, refused) in diary.entries
    assert not any(entry[0] == "moved" for entry in diary.entries)


@pytest.mark.parametrize("what", ["arena_wanted", "ring_wanted"])
def test_memory_the_observer_refuses_is_not_counted(runtime, what):
    backend = CpuSimBackend(runtime, observer=Diary(**{what: MemoryError("full")}))
    allocate = {
        "arena_wanted": lambda: backend.pinned_arena(NBYTES),
        "ring_wanted": lambda: backend.snapshot_ring(2, NBYTES, torch.device("cpu")),
    }
    with pytest.raises(MemoryError, match="full"):
        allocate[what]()
    assert backend.pinned_bytes == 0
    assert backend.device_bytes == 0
    backend.close()


def test_byte_ranges_span_a_tensor_from_its_first_to_its_last_element():
    whole = torch.zeros(8, 4, dtype=torch.int16)
    start = whole.data_ptr()
    assert ByteRange.of(whole) == ByteRange(start, start + 64)
    assert ByteRange.of(whole[2:4]) == ByteRange(start + 16, start + 32)
    assert ByteRange.of(whole[:, 1]) == ByteRange(start + 2, start + 60)
    assert ByteRange.of(whole[:0]).nbytes == 0
    assert ByteRange.of(whole[2:4]).overlaps(ByteRange.of(whole[3:]))
    assert not ByteRange.of(whole[2:4]).overlaps(ByteRange.of(whole[4:]))
