# SPDX-License-Identifier: Apache-2.0
"""Page-locked and device memory of `cuda` and `npu`: exact, kept while a copy may use it, never copied around."""

from __future__ import annotations

import gc
import logging
import weakref
from itertools import count

import pytest
import torch
from fake_accelerator.backends import VENDORS, Vendor
from fake_accelerator.rig import ARENA_BYTES, WAIT_S, FakeRig, on_a_thread, step_rows

from omni_core.backend import BackendError, BackendFeatureUnsupportedError, DeviceCopyError, DeviceWaitTimeoutError
from omni_core.backend.host_pages import PAGE_BYTES

# --- pins


def test_fault_087_exactly_what_was_asked_for_is_pinned(rig: FakeRig) -> None:
    nbytes = 3 * PAGE_BYTES + 64
    arena = rig.backend.pinned_arena(nbytes)
    assert (arena.pinned_bytes, arena.buffer.numel()) == (nbytes, nbytes)
    arena.close()
    arena.close()
    assert arena.pinned_bytes == 0
    assert len(rig.machine.pinned) == 1  # the rig's own


def test_fault_085_large_ranges_are_pinned_in_pieces(rig: FakeRig) -> None:
    rig.machine.max_pin_bytes = PAGE_BYTES
    rig.machine.pins.clear()
    arena = rig.backend.pinned_arena(3 * PAGE_BYTES + 64, chunk_bytes=PAGE_BYTES)
    start = arena.buffer.data_ptr()
    assert [address for address, _ in rig.machine.pins] == [start + piece * PAGE_BYTES for piece in range(4)]
    arena.close()
    assert len(rig.machine.pinned) == 1


@pytest.mark.parametrize(("first_row", "num_rows"), [(0, 3), (60, 8), (0, 300), (64, 64), (63, 66), (128, 128)])
def test_a_copy_over_the_seams_of_pieces_is_made_in_parts(rig: FakeRig, first_row: int, num_rows: int) -> None:
    arena = rig.backend.pinned_arena(5 * PAGE_BYTES, chunk_bytes=PAGE_BYTES)  # 128 rows each
    rows = step_rows(1, num_rows)
    place = arena.buffer.view(rows.dtype).view(-1, rows.shape[1])[first_row : first_row + num_rows]
    with rig.machine.hold_copies():
        done = rig.backend.copy_to_host(place, rows, rig.stream)
        assert not done.query()
    done.synchronize(WAIT_S)
    assert torch.equal(place, rows)
    touched = {row * rows[0].nbytes // PAGE_BYTES for row in (first_row, first_row + num_rows - 1)}
    assert rig.machine.copies_done == max(touched) - min(touched) + 1


def test_fault_090_a_refused_pin_names_size_and_knob_and_leaves_nothing(rig: FakeRig) -> None:
    rig.machine.max_pin_bytes = PAGE_BYTES
    rig.machine.pins.clear()
    with pytest.raises(MemoryError, match=rf"arena of {8 * PAGE_BYTES} bytes.*HostRegister.*pin_chunk_bytes"):
        rig.backend.pinned_arena(8 * PAGE_BYTES)
    assert rig.machine.pins == []  # nothing smaller was tried
    assert len(rig.machine.pinned) == 1
    torch.empty(1).fill_(0)  # and the thread's next launch is innocent
    assert rig.backend.pinned_arena(PAGE_BYTES).pinned_bytes == PAGE_BYTES


def test_a_pin_that_is_not_whole_pages_is_registered_as_ascend_wants_it(make_rig) -> None:
    rig = make_rig(Vendor.NPU)
    rig.machine.pins.clear()
    arena = rig.backend.pinned_arena(PAGE_BYTES + 1)
    assert [nbytes for _, nbytes in rig.machine.pins] == [2 * PAGE_BYTES]
    assert arena.pinned_bytes == PAGE_BYTES + 1


def test_fault_087_without_npurt_torch_pins_and_the_rounded_bytes_are_told(make_rig) -> None:
    rig = make_rig(Vendor.OLDER_NPU)
    assert not rig.backend.capabilities.exact_pinning
    arena = rig.backend.pinned_arena(5 * PAGE_BYTES + 1)
    assert (arena.buffer.numel(), arena.pinned_bytes) == (5 * PAGE_BYTES + 1, 8 * PAGE_BYTES)
    destination, done = rig.copy(step_rows(1))
    done.synchronize(WAIT_S)
    assert torch.equal(destination, step_rows(1))
    with pytest.raises(BackendFeatureUnsupportedError, match=r"npuHostRegister \(torch_npu 2\.14\).*pin_chunk_bytes=4"):
        rig.backend.pinned_arena(2 * PAGE_BYTES, chunk_bytes=PAGE_BYTES)
    rig.machine.max_pin_bytes = PAGE_BYTES
    with pytest.raises(MemoryError, match=f"{8 * PAGE_BYTES} bytes of .* an arena of {7 * PAGE_BYTES}"):
        rig.backend.pinned_arena(7 * PAGE_BYTES)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_an_arena_of_nothing_is_refused(rig: FakeRig, nbytes: int) -> None:
    with pytest.raises(ValueError, match=f"nbytes={nbytes} must be at least 1"):
        rig.backend.pinned_arena(nbytes)


# --- copies that would wait without a word


def pageable(rig: FakeRig, rows: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(rows)


def strided(rig: FakeRig, rows: torch.Tensor) -> torch.Tensor:
    return rig.page.take((rows.shape[0], 2 * rows.shape[1]), rows.dtype)[:, ::2]


def of_another_dtype(rig: FakeRig, rows: torch.Tensor) -> torch.Tensor:
    return rig.page.take(rows.shape, torch.float64)


def of_another_shape(rig: FakeRig, rows: torch.Tensor) -> torch.Tensor:
    return rig.page.take((rows.shape[0] + 1, *rows.shape[1:]), rows.dtype)


def of_a_closed_arena(rig: FakeRig, rows: torch.Tensor) -> torch.Tensor:
    arena = rig.backend.pinned_arena(PAGE_BYTES)
    taken = arena.buffer[: rows.nbytes].view(rows.dtype).view(rows.shape)
    arena.close()
    return taken


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (pageable, "lies in no live pinned arena"),
        (strided, r"destination strides \(16, 2\).*must be contiguous"),
        (of_another_dtype, r"torch\.float64, source is .*torch\.float32"),
        (of_another_shape, r"destination is \(6, 8\)"),
        (of_a_closed_arena, "lies in no live pinned arena"),
    ],
)
def test_a_copy_that_would_not_be_asynchronous_is_refused_before_the_device_sees_it(rig: FakeRig, make, says) -> None:
    rows = step_rows(1)
    destination = make(rig, rows)
    with pytest.raises(ValueError, match=says):
        rig.backend.copy_to_host(destination, rows, rig.stream)
    rig.stream.record().synchronize(WAIT_S)
    assert (rig.machine.copies_done, rig.machine.calls) == (0, {})


def test_a_source_that_is_not_contiguous_or_not_on_the_device_is_refused(rig: FakeRig) -> None:
    rows = step_rows(1)
    with pytest.raises(ValueError, match=r"source strides \(1, 5\)"):
        rig.backend.copy_to_host(rig.destination(rows), step_rows(1).t().contiguous().t(), rig.stream)
    with pytest.raises(ValueError, match=rf"source lies on meta, which backend '{rig.backend.name}' of cpu:0"):
        rig.backend.copy_to_host(rig.destination(rows), rows.to("meta"), rig.stream)


def test_a_copy_on_the_producers_own_stream_is_refused(rig: FakeRig) -> None:
    rows = step_rows(1)
    with pytest.raises(BackendFeatureUnsupportedError, match=r"'current-0' .*new_stream"):
        rig.backend.copy_to_host(rig.destination(rows), rows, rig.backend.current_stream())


# --- kept while it is used


def test_a_queued_copy_keeps_what_it_uses_and_lets_go_when_it_has_ended(rig: FakeRig) -> None:
    rows = step_rows(1)
    source = rows.clone()
    with rig.machine.hold_copies():
        destination, done = rig.copy(source)
        gone = weakref.ref(source)
        del source
        gc.collect()
        assert gone() is not None
    done.synchronize(WAIT_S)
    assert torch.equal(destination, rows)
    rig.copy(step_rows(2))[1].synchronize(WAIT_S)
    gc.collect()
    assert gone() is None


def test_what_a_queued_copy_uses_cannot_be_closed_under_it(rig: FakeRig) -> None:
    ring = rig.backend.snapshot_ring(1, 4096, torch.device("cpu"))
    clone = rig.backend.snapshot(step_rows(1), ring.slot(0))
    with rig.machine.hold_copies():
        destination, done = rig.copy(clone)
        for memory in (rig.arena, ring):
            with pytest.raises(BackendError, match="closed while a queued copy still uses it"):
                memory.close()
        assert (rig.arena.pinned_bytes, ring.device_bytes) == (ARENA_BYTES, 4096)
    done.synchronize(WAIT_S)
    assert torch.equal(destination, step_rows(1))
    del destination
    ring.close()
    rig.arena.close()
    assert (rig.machine.pinned, ring.device_bytes) == ({}, 0)


def test_memory_of_a_failed_copy_stays_locked_and_is_never_freed(rig: FakeRig, caplog) -> None:
    rig.backend.close()
    backend = rig.vendor.backend(rig.machine)
    arena, stream, source = backend.pinned_arena(PAGE_BYTES), backend.new_stream("copy"), step_rows(1)
    destination = arena.buffer[: source.nbytes].view(source.dtype).view(source.shape)
    rig.machine.fail_next_copy(RuntimeError("ECC error"))
    done = backend.copy_to_host(destination, source, stream)
    with pytest.raises(DeviceCopyError):
        done.synchronize(WAIT_S)
    with caplog.at_level(logging.WARNING):
        arena.close()
        arena.close()
    assert len(caplog.records) == 1 + (rig.vendor is Vendor.CUDA)  # there the device is lost, which is said, too
    assert f"{PAGE_BYTES} page-locked bytes stay as they are" in caplog.text
    backend.close()
    kept = [weakref.ref(each) for each in (backend, destination, source)]
    del backend, arena, stream, source, destination, done
    gc.collect()
    assert len(rig.machine.pinned) == 1
    assert [each() is not None for each in kept] == [True, True, True]


def test_a_copy_that_was_perhaps_queued_counts_as_failed(rig: FakeRig, monkeypatch) -> None:
    destination, rows = rig.destination(step_rows(1)), step_rows(1)
    record, numbers = rig.module.Event.record, count(1)

    def record_once(event, stream=None):
        # The mark on the producer's stream can be made; the one behind the copy cannot.
        if next(numbers) > 1:
            raise RuntimeError("no more events")
        record(event, stream)

    with monkeypatch.context() as patched:
        patched.setattr(rig.module.Event, "record", record_once)
        with pytest.raises(DeviceCopyError, match="no more events"):
            rig.backend.copy_to_host(destination, rows, rig.stream)
    rig.arena.close()
    assert len(rig.machine.pinned) == 1


def test_a_range_the_driver_does_not_unlock_is_kept_with_a_warning(rig: FakeRig, caplog) -> None:
    rig.backend.close()
    backend = rig.vendor.backend(rig.machine)
    arena = backend.pinned_arena(PAGE_BYTES)
    buffer = weakref.ref(arena.buffer)
    rig.machine.pinned.clear()
    with caplog.at_level(logging.WARNING):
        arena.close()
    assert f"{PAGE_BYTES} page-locked bytes stay as they are until the process ends" in caplog.text
    assert "HostUnregister" in caplog.text
    backend.close()
    del backend, arena
    gc.collect()
    assert buffer() is not None


# --- rings


def test_a_ring_of_another_device_or_of_nothing_is_refused(rig: FakeRig) -> None:
    with pytest.raises(ValueError, match=r"of cpu:0 does not own meta"):
        rig.backend.snapshot_ring(1, 64, torch.device("meta"))
    for depth, nbytes in ((0, 64), (1, 0)):
        with pytest.raises(ValueError, match=f"depth={depth} and nbytes={nbytes} must be at least 1"):
            rig.backend.snapshot_ring(depth, nbytes, torch.device("cpu"))


def test_a_ring_that_the_device_refuses_names_size_and_knobs(rig: FakeRig) -> None:
    with pytest.raises(MemoryError, match=rf"refused 2 buffers of {1 << 60} bytes; lower staging_depth"):
        rig.backend.snapshot_ring(2, 1 << 60, torch.device("cpu"))


def test_slots_outside_a_ring_and_of_a_closed_one_are_refused(rig: FakeRig) -> None:
    ring = rig.backend.snapshot_ring(2, 64, torch.device("cpu"))
    for index in (-1, 2):
        with pytest.raises(IndexError, match=f"has 2 buffers, asked for {index}"):
            ring.slot(index)
    ring.close()
    with pytest.raises(IndexError, match="has 0 buffers"):
        ring.slot(0)


# --- closing


def test_closing_waits_for_queued_copies_and_gives_everything_back(rig: FakeRig) -> None:
    destination, done = rig.copy(step_rows(1))
    ring = rig.backend.snapshot_ring(1, 64, torch.device("cpu"))
    on_a_thread(rig.backend.close)  # a thread that never used the device
    assert (rig.machine.pinned, ring.device_bytes, rig.machine.copies_done) == ({}, 0, 1)
    assert done.query()
    assert torch.equal(destination, step_rows(1))
    rig.backend.close()
    for call in (lambda: rig.backend.new_stream("x"), lambda: rig.backend.pinned_arena(64), rig.stream.record):
        with pytest.raises(BackendError, match="closed"):
            call()


@pytest.mark.parametrize("vendor", VENDORS)
def test_closing_is_bounded_names_the_stuck_stream_and_can_be_done_again(make_rig, vendor: Vendor) -> None:
    rig = make_rig(vendor, close_timeout_s=0.02)
    with rig.machine.hold_copies():
        rig.copy(step_rows(1))
        with pytest.raises(DeviceWaitTimeoutError, match=r"not closed: stream 'copy': .*close_timeout_s=0\.02"):
            rig.backend.close()
        assert rig.arena.pinned_bytes == ARENA_BYTES
    rig.machine.wait_until(lambda: rig.machine.copies_done == 1)
    rig.backend.close()
    assert rig.machine.pinned == {}
