# SPDX-License-Identifier: Apache-2.0
"""Checks of what a step costs the engine thread: it never waits, and nothing is allocated."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from omni_core.backend.conformance.rig import MIB, SMALL_SHAPE, UNWRITTEN, WAIT_S, Check, Rig, require, rows


def queueing_never_blocks(rig: Rig) -> None:
    """Snapshot, copy_to_host, record and wait return while copies are stalled."""
    source, destination = rig.on_device(rows(5, SMALL_SHAPE)), rig.destination(SMALL_SHAPE)
    ring = rig.ring_slot(MIB)
    stream, other = rig.stream("first"), rig.stream("second")
    finished: list[bool] = []

    def queue() -> None:
        rig.backend.bind_thread()
        rig.backend.copy_to_host(destination, rig.backend.snapshot(source, ring), stream)
        other.wait(stream.record())
        other.record()
        rig.backend.current_stream().record()
        finished.append(True)

    with rig.stalled():
        returned = rig.runtime.spawn("conformance-queue", queue).join(WAIT_S / 3)
        done_early = rig.copies_can_be_pending and bool((destination != UNWRITTEN).any())
    require(returned, "snapshot, copy_to_host, record or wait blocked the caller while copies were stalled")
    require(bool(finished), "queueing raised on another thread")
    require(not done_early, "the copy was made when copy_to_host returned, although copies were stalled")
    for used in (stream, other):
        used.record().synchronize(WAIT_S)


def a_step_allocates_nothing(rig: Rig) -> None:
    """Once warm, snapshot and copy_to_host make no tensor with memory of its own, on the device or the host."""
    source, ring, page = rig.on_device(rows(5, SMALL_SHAPE)), rig.ring(1, MIB), rig.page(MIB)
    stream = rig.stream()
    watch = _FreshTensors()
    for warm in (False, True):
        page.restart()
        carver = ring.slot(0)
        destination = page.take(SMALL_SHAPE, source.dtype)
        with watch:
            done = rig.backend.copy_to_host(destination, rig.backend.snapshot(source, carver), stream)
        done.synchronize(WAIT_S)
        if not warm:
            watch.operations.clear()
    require(not watch.operations, f"snapshot or copy_to_host of a warm step ran {', '.join(watch.operations)}")


class _FreshTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class is untyped
    """Entered on a thread, notes its operations that give a tensor which is neither an argument nor a view of one."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(returned.alias_info is None and "Tensor" in str(returned.type) for returned in func._schema.returns):
            self.operations.append(str(func))
        return func(*args, **(kwargs or {}))


ASYNCHRONY_CHECKS: tuple[Check, ...] = (queueing_never_blocks, a_step_allocates_nothing)
