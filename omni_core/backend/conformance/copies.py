# SPDX-License-Identifier: Apache-2.0
"""Checks of what is copied: the right rows, whatever happens to their source meanwhile."""

from __future__ import annotations

import torch

from omni_core.backend.conformance.rig import SMALL_SHAPE, WAIT_S, Check, Rig, require, require_equal, rows
from omni_core.backend.memory import aligned_nbytes, tensor_nbytes

_MIB = 1 << 20


def rows_arrive_unchanged(rig: Rig) -> None:
    """Rows of every dtype reach the host bit for bit."""
    stream = rig.stream()
    for tag, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8), start=1):
        expected = rows(tag, (13, 3, 5), dtype)
        ring, page = rig.ring_slot(4096), rig.page(4096)
        clone = rig.backend.snapshot(rig.on_device(expected), ring)
        require(
            clone.is_contiguous() and clone.shape == expected.shape and clone.dtype == expected.dtype,
            f"snapshot of {tuple(expected.shape)} {dtype} gave {tuple(clone.shape)} {clone.dtype}, "
            f"contiguous: {clone.is_contiguous()}",
        )
        destination = page.take(expected.shape, dtype)
        rig.backend.copy_to_host(destination, clone, stream).synchronize(WAIT_S)
        require_equal(destination, expected, f"{dtype} rows copied to the host")


def strided_rows_are_snapshotted(rig: Rig) -> None:
    """A snapshot of strided rows is contiguous and holds the same rows."""
    wide = rows(3, (19, 12))
    expected = wide[:, 2:9]
    clone = rig.backend.snapshot(rig.on_device(wide)[:, 2:9], rig.ring_slot(4096))
    require(clone.is_contiguous(), "the snapshot of strided rows is not contiguous")
    destination = rig.page(4096).take(expected.shape, expected.dtype)
    rig.backend.copy_to_host(destination, clone, rig.stream()).synchronize(WAIT_S)
    require_equal(destination, expected, "strided rows")


def snapshot_sees_the_last_queued_work(rig: Rig) -> None:
    """Snapshot and copy come after everything queued on the current stream before them."""
    stream, page, ring = rig.stream(), rig.page(_MIB), rig.ring_slot(_MIB)
    static = rig.on_device(rows(0, SMALL_SHAPE))
    for step in range(1, 4):
        expected = rows(step, SMALL_SHAPE)
        produced = rig.on_device(expected)
        ring.restart()
        page.restart()
        destination = page.take(expected.shape, expected.dtype)
        # A late producer: a copy that does not wait for it takes the rows of the step before.
        rig.keep_busy(0.05)
        static.copy_(produced)
        rig.backend.copy_to_host(destination, rig.backend.snapshot(static, ring), stream).synchronize(WAIT_S)
        require_equal(destination, expected, f"rows of step {step}, copied right after their producer was queued")


def overwriting_the_source_after_snapshot_is_harmless(rig: Rig) -> None:
    """A snapshot keeps its rows when the next step overwrites their buffer."""
    expected = rows(1, SMALL_SHAPE)
    static = rig.on_device(expected)
    later = rig.on_device(rows(2, SMALL_SHAPE))
    destination = rig.page(_MIB).take(expected.shape, expected.dtype)
    stream, ring = rig.stream(), rig.ring_slot(_MIB)
    with rig.stalled():
        done = rig.backend.copy_to_host(destination, rig.backend.snapshot(static, ring), stream)
        static.copy_(later)
    done.synchronize(WAIT_S)
    require_equal(destination, expected, "rows snapshotted before a graph replay overwrote their buffer")


def dropping_the_source_after_queueing_is_harmless(rig: Rig) -> None:
    """A queued copy reads the rows of its source even if nobody else holds it."""
    expected = rows(4, SMALL_SHAPE)
    source = rig.on_device(expected)
    destination = rig.page(_MIB).take(expected.shape, expected.dtype)
    stream = rig.stream()
    with rig.stalled():
        done = rig.backend.copy_to_host(destination, source, stream)
        del source
        # What the allocator would hand the freed memory to.
        others = [rig.on_device(rows(9, SMALL_SHAPE)) for _ in range(8)]
    done.synchronize(WAIT_S)
    del others
    require_equal(destination, expected, "rows whose source was let go while their copy was queued")


def inference_mode_makes_no_difference(rig: Rig) -> None:
    """Rows are carved, snapshotted and copied in inference mode and outside it alike."""
    # vLLM runs its steps in inference mode; our helper threads, and simulated engines, are outside it.
    ring, page, stream = rig.ring_slot(_MIB), rig.page(_MIB), rig.stream()
    for turn, inside in enumerate((True, False, True, False)):
        ring.restart()
        page.restart()
        with torch.inference_mode(inside):
            expected = rows(turn, SMALL_SHAPE)
            destination = page.take(expected.shape, expected.dtype)
            destination.fill_(-1)
            clone = rig.backend.snapshot(rig.on_device(expected), ring)
            rig.backend.copy_to_host(destination, clone, stream).synchronize(WAIT_S)
            require_equal(destination, expected, f"rows copied with inference mode {'on' if inside else 'off'}")
            page.used().fill_(0)
            rig.backend.copy_to_host(page.used(), ring.used(), stream).synchronize(WAIT_S)
            require_equal(destination, expected, f"whole page copied with inference mode {'on' if inside else 'off'}")


def ring_and_arena_mirror_each_other(rig: Rig) -> None:
    """Equal requests lie at equal offsets on the device and in the page, so one transfer moves all keys."""
    keys = ((torch.bfloat16, (37, 8)), (torch.int64, (37,)), (torch.uint8, (37, 3, 5)), (torch.float32, (1, 2)))
    nbytes = sum(aligned_nbytes(tensor_nbytes(shape, dtype)) for dtype, shape in keys)
    ring, page, stream = rig.ring(2, nbytes), rig.page(nbytes), rig.stream()
    for turn in range(2):
        for index in range(2):
            carver = ring.slot(index)
            require(carver.used_bytes == 0, f"slot({index}) came with {carver.used_bytes} bytes already handed out")
            require(carver.capacity_bytes == nbytes, f"slot({index}) holds {carver.capacity_bytes} bytes, not {nbytes}")
            page.restart()
            expected, views = [], []
            for place, (dtype, shape) in enumerate(keys):
                host_rows = rows(turn * 8 + index * 4 + place, shape, dtype)
                clone = rig.backend.snapshot(rig.on_device(host_rows), carver)
                view = page.take(shape, dtype)
                offset = clone.data_ptr() - carver.used().data_ptr()
                require(
                    offset == view.data_ptr() - page.used().data_ptr(),
                    f"key {place} lies at byte {offset} on the device and elsewhere in the page",
                )
                expected.append(host_rows)
                views.append(view)
            rig.backend.copy_to_host(page.used(), carver.used(), stream).synchronize(WAIT_S)
            for place, (view, host_rows) in enumerate(zip(views, expected, strict=True)):
                require_equal(view, host_rows, f"key {place} of one transfer of all keys")


def unequal_copies_are_refused(rig: Rig) -> None:
    """A copy between unequal shapes or dtypes is refused by name, never broadcast or cast."""
    page, stream = rig.page(_MIB), rig.stream()
    source = rig.on_device(rows(1, (1, 16)))
    cases = (
        ("another shape, which would broadcast", page.take((37, 16), torch.int32), ("37", "16")),
        ("another dtype, which would be cast", page.take((1, 16), torch.float32), ("int32", "float32")),
    )
    for what, destination, named in cases:
        destination.fill_(5)
        error: Exception | None = None
        try:
            rig.backend.copy_to_host(destination, source, stream)
        except Exception as caught:  # the contract leaves the class to the backend
            error = caught
        stream.record().synchronize(WAIT_S)
        require(error is not None, f"a destination of {what} was accepted")
        require(
            all(word in str(error) for word in named), f"the refusal of {what} must name {' and '.join(named)}: {error}"
        )
        require(bool((destination == 5).all()), f"a refused destination of {what} was written")


COPY_CHECKS: tuple[Check, ...] = (
    rows_arrive_unchanged,
    strided_rows_are_snapshotted,
    snapshot_sees_the_last_queued_work,
    overwriting_the_source_after_snapshot_is_harmless,
    dropping_the_source_after_queueing_is_harmless,
    inference_mode_makes_no_difference,
    ring_and_arena_mirror_each_other,
    unequal_copies_are_refused,
)
