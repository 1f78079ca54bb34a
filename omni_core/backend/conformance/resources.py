# SPDX-License-Identifier: Apache-2.0
"""Checks of what a backend says of itself and of the memory it holds."""

from __future__ import annotations

from contextlib import suppress

import torch

from omni_core.backend.conformance.rig import SMALL_SHAPE, WAIT_S, Check, Rig, require, require_equal, rows
from omni_core.backend.errors import BackendFeatureUnsupportedError
from omni_core.backend.host_pages import PAGE_BYTES
from omni_core.backend.memory import ByteCarver

ABSURD_NBYTES = 1 << 60
"""More than any machine has."""


def describes_itself(rig: Rig) -> None:
    """The name, the availability, the owned tensors and the device facts agree with each other."""
    backend = rig.backend
    require(bool(backend.name), "name is empty")
    require(
        type(backend).unavailable_reason() is None,
        f"unavailable_reason() is {type(backend).unavailable_reason()!r} although the backend was made",
    )
    require(
        rig.device.type == backend.device_type,
        f"device_info().device={str(rig.device)!r} is not of device_type={backend.device_type!r}",
    )
    require(
        backend.owns(torch.empty(1, device=rig.device)), f"owns() is False for a tensor on its own device {rig.device}"
    )
    require(not backend.owns(torch.empty(1, device="meta")), "owns() is True for a tensor on the device 'meta'")
    info = backend.device_info()
    require(bool(info.name), "device_info().name is empty")
    require(
        0 <= info.free_memory_bytes <= info.total_memory_bytes and info.total_memory_bytes > 0,
        f"device_info(): {info.free_memory_bytes} of {info.total_memory_bytes} bytes are free",
    )


def arenas_are_accounted(rig: Rig) -> None:
    """An arena says exactly what it pinned, and 0 once closed."""
    nbytes = 3 * 4096 + 64
    arena = rig.backend.pinned_arena(nbytes)
    buffer = arena.buffer
    require(
        buffer.dtype == torch.uint8 and buffer.dim() == 1 and buffer.device.type == "cpu" and buffer.numel() == nbytes,
        f"pinned_arena({nbytes}).buffer is {tuple(buffer.shape)} {buffer.dtype} on {buffer.device}",
    )
    pinned = rig.backend.capabilities.pinned_memory
    exact = rig.backend.capabilities.exact_pinning
    at_least = nbytes if pinned else 0
    require(
        arena.pinned_bytes == at_least or (pinned and not exact and arena.pinned_bytes > nbytes),
        f"pinned_bytes={arena.pinned_bytes} of an arena of {nbytes} with capabilities.pinned_memory={pinned} and "
        f"exact_pinning={exact}",
    )
    require(
        buffer.is_pinned() == pinned,
        f"capabilities.pinned_memory={pinned}, but the arena's buffer says is_pinned()={buffer.is_pinned()}",
    )
    arena.close()
    arena.close()
    require(arena.pinned_bytes == 0, f"pinned_bytes={arena.pinned_bytes} after close()")


def an_arena_in_pieces_is_one_range(rig: Rig) -> None:
    """An arena page-locked in pieces is as long as asked for, to the byte, and rows copied over its seams arrive.

    Where pieces are not to be had (`exact_pinning`), it is refused by name.
    """
    chunk_bytes = PAGE_BYTES
    nbytes = 3 * chunk_bytes + 64
    if not rig.backend.capabilities.exact_pinning:
        refusal: BackendFeatureUnsupportedError | None = None
        try:
            rig.backend.pinned_arena(nbytes, chunk_bytes=chunk_bytes)
        except BackendFeatureUnsupportedError as caught:
            refusal = caught
        require(
            str(nbytes) in str(refusal) and str(chunk_bytes) in str(refusal),
            f"exact_pinning=False: an arena of {nbytes} bytes in pieces of {chunk_bytes} must be refused with "
            f"BackendFeatureUnsupportedError and both numbers: {refusal!r}",
        )
        return
    arena = rig.backend.pinned_arena(nbytes, chunk_bytes=chunk_bytes)
    require(arena.buffer.numel() == nbytes, f"an arena of {nbytes} bytes in pieces has {arena.buffer.numel()}")
    pinned = rig.backend.capabilities.pinned_memory
    require(
        arena.pinned_bytes == (nbytes if pinned else 0),
        f"pinned_bytes={arena.pinned_bytes} of an arena of {nbytes} in pieces of {chunk_bytes}",
    )
    expected = rows(5, (nbytes // 64, 16))
    destination = ByteCarver(arena.buffer).take(expected.shape, expected.dtype)
    source = rig.on_device(expected)
    rig.backend.copy_to_host(destination, source, rig.stream()).synchronize(WAIT_S)
    require_equal(destination, expected, f"rows copied over the seams of pieces of {chunk_bytes} bytes")
    arena.close()
    require(arena.pinned_bytes == 0, f"pinned_bytes={arena.pinned_bytes} after close()")


def rings_are_accounted(rig: Rig) -> None:
    """A ring says what it holds on the device, and 0 once closed."""
    ring = rig.backend.snapshot_ring(3, 4096, rig.device)
    require(ring.device_bytes >= 3 * 4096, f"device_bytes={ring.device_bytes} of 3 buffers of 4096 bytes")
    places = {ring.slot(index).take((1,), torch.uint8).data_ptr() for index in range(3)}
    require(len(places) == 3, f"the 3 buffers of a ring lie at {len(places)} places")
    require(rig.backend.owns(ring.slot(0).take((1,), torch.uint8)), f"a ring made for {rig.device} does not lie there")
    ring.close()
    ring.close()
    require(ring.device_bytes == 0, f"device_bytes={ring.device_bytes} after close()")


def a_refused_arena_leaves_nothing(rig: Rig) -> None:
    """After a refused arena, others are allocated and used as before."""
    with suppress(MemoryError):
        rig.backend.pinned_arena(ABSURD_NBYTES)
    source, destination = rig.on_device(rows(8, SMALL_SHAPE)), rig.destination(SMALL_SHAPE)
    rig.backend.copy_to_host(destination, source, rig.stream()).synchronize(WAIT_S)
    require_equal(destination, rows(8, SMALL_SHAPE), "rows copied into an arena allocated after a refused one")


def padding_never_shrinks_a_step(rig: Rig) -> None:
    """A padded token count is never smaller than the real one."""
    for capture_sizes in ((), (1, 2, 4, 8), (16,)):
        padding = rig.backend.graph_padding(capture_sizes)
        for num_tokens in range(1, 20):
            padded = padding.padded(num_tokens)
            require(
                padded >= num_tokens, f"capture_sizes={capture_sizes}: {num_tokens} tokens are padded to {padded} rows"
            )


DESCRIPTION_CHECKS: tuple[Check, ...] = (describes_itself, padding_never_shrinks_a_step)
MEMORY_CHECKS: tuple[Check, ...] = (
    arenas_are_accounted,
    an_arena_in_pieces_is_one_range,
    a_refused_arena_leaves_nothing,
    rings_are_accounted,
)
