# SPDX-License-Identifier: Apache-2.0
"""Checks of what a backend must refuse instead of doing something slower or something else, and of its words."""

from __future__ import annotations

import torch

from omni_core.backend.conformance.resources import ABSURD_NBYTES
from omni_core.backend.conformance.rig import MIB, SMALL_SHAPE, UNWRITTEN, WAIT_S, Check, Rig, require, rows


def refused_memory_is_explained(rig: Rig) -> None:
    """A refused arena raises MemoryError and names the size."""
    error: MemoryError | None = None
    try:
        rig.backend.pinned_arena(ABSURD_NBYTES)
    except MemoryError as caught:
        error = caught
    require(error is not None, f"pinned_arena({ABSURD_NBYTES}) did not raise MemoryError")
    require(str(ABSURD_NBYTES) in str(error), f"the message must name the size {ABSURD_NBYTES}: {error}")


def unequal_copies_are_refused(rig: Rig) -> None:
    """A copy between unequal shapes or dtypes is refused by name, never broadcast or cast."""
    page = rig.page(MIB)
    source = rig.on_device(rows(1, (1, 16)))
    _require_refusal(rig, "another shape, which would broadcast", page.take((37, 16), torch.int32), source, "37")
    _require_refusal(rig, "another dtype, which would be cast", page.take((1, 16), torch.float32), source, "float32")


def strided_copies_are_refused(rig: Rig) -> None:
    """A copy from or to strided rows is refused by name: it would be made through a temporary, and waited for."""
    page = rig.page(MIB)
    wide = page.take((37, 32), torch.int32)
    source, wide_source = rig.on_device(rows(1, SMALL_SHAPE)), rig.on_device(rows(1, (37, 32)))
    _require_refusal(rig, "strided rows", wide[:, :16], source, "contiguous")
    destination = page.take(SMALL_SHAPE, torch.int32)
    _require_refusal(rig, "the rows of a strided source", destination, wide_source[:, :16], "contiguous")


def pageable_destinations_are_refused(rig: Rig) -> None:
    """A copy into memory of no arena is refused by name: devices make it without a word, and hold the caller up."""
    pageable = torch.empty(SMALL_SHAPE, dtype=torch.int32)
    _require_refusal(rig, "pageable memory", pageable, rig.on_device(rows(1, SMALL_SHAPE)), "arena")


def _require_refusal(rig: Rig, what: str, destination: torch.Tensor, source: torch.Tensor, named: str) -> None:
    destination.fill_(UNWRITTEN)
    stream = rig.stream()
    error: Exception | None = None
    try:
        rig.backend.copy_to_host(destination, source, stream)
    except Exception as caught:  # whatever it raises instead is told
        error = caught
    stream.record().synchronize(WAIT_S)
    require(error is not None, f"a destination of {what} was accepted")
    require(
        isinstance(error, ValueError) and named in str(error),
        f"the refusal of {what} must be a ValueError that names {named!r}: {error!r}",
    )
    require(bool((destination == UNWRITTEN).all()), f"a refused destination of {what} was written")


REFUSAL_CHECKS: tuple[Check, ...] = (
    refused_memory_is_explained,
    unequal_copies_are_refused,
    strided_copies_are_refused,
    pageable_destinations_are_refused,
)
