# SPDX-License-Identifier: Apache-2.0
"""Checks of what is copied: every bit, whatever its dtype, its layout and torch's mode."""

from __future__ import annotations

import torch

from omni_core.backend.conformance.rig import MIB, SMALL_SHAPE, WAIT_S, Check, Rig, require, require_equal, rows
from omni_core.backend.memory import aligned_nbytes, tensor_nbytes

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8)
_TWO_BYTE_PATTERNS = 1 << 16


def rows_arrive_unchanged(rig: Rig) -> None:
    """Rows of every dtype reach the host bit for bit: every pattern, NaNs and negative zeros included."""
    stream = rig.stream()
    patterns = torch.arange(_TWO_BYTE_PATTERNS, dtype=torch.int32).to(torch.int16)
    for tag, dtype in enumerate(_DTYPES, start=1):
        for expected in (rows(tag, (13, 3, 5), dtype), patterns.view(dtype).view(-1, 8)):
            nbytes = aligned_nbytes(tensor_nbytes(expected.shape, dtype))
            ring, page = rig.ring_slot(nbytes), rig.page(nbytes)
            clone = rig.backend.snapshot(rig.on_device(expected), ring)
            require(
                clone.is_contiguous() and clone.shape == expected.shape and clone.dtype == expected.dtype,
                f"snapshot of {tuple(expected.shape)} {dtype} gave {tuple(clone.shape)} {clone.dtype}, "
                f"contiguous: {clone.is_contiguous()}",
            )
            require_equal(clone.cpu(), expected, f"{dtype} rows of a snapshot, read by torch alone")
            destination = page.take(expected.shape, dtype)
            rig.backend.copy_to_host(destination, clone, stream).synchronize(WAIT_S)
            require_equal(destination, expected, f"{dtype} rows copied to the host")


def strided_rows_are_snapshotted(rig: Rig) -> None:
    """A snapshot of strided rows is contiguous and holds the same rows."""
    wide = rows(3, (19, 12))
    expected = wide[:, 2:9]
    clone = rig.backend.snapshot(rig.on_device(wide)[:, 2:9], rig.ring_slot(4096))
    require(clone.is_contiguous(), "the snapshot of strided rows is not contiguous")
    destination = rig.destination(expected.shape)
    rig.backend.copy_to_host(destination, clone, rig.stream()).synchronize(WAIT_S)
    require_equal(destination, expected, "strided rows")


def inference_mode_makes_no_difference(rig: Rig) -> None:
    """Rows are carved, snapshotted and copied in inference mode and outside it alike."""
    # vLLM runs its steps in inference mode; our helper threads, and simulated engines, are outside it.
    ring, page, stream = rig.ring_slot(MIB), rig.page(MIB), rig.stream()
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


FIDELITY_CHECKS: tuple[Check, ...] = (
    rows_arrive_unchanged,
    strided_rows_are_snapshotted,
    inference_mode_makes_no_difference,
    ring_and_arena_mirror_each_other,
)
