# SPDX-License-Identifier: Apache-2.0
"""What the conformance checks stand on: a fresh backend, rows that say where they belong, and a way to stall copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Protocol, runtime_checkable

import torch

from omni_core.backend.base import DeviceBackend, PinnedArena, SnapshotRing, Stream
from omni_core.backend.memory import ByteCarver
from omni_core.runtime import Runtime

BackendFactory = Callable[[Runtime], DeviceBackend]
"""Makes a fresh backend whose threads, locks and waits go through the given runtime."""

WAIT_S = 30.0
"""How long a check waits for something that must come."""
SMALL_SHAPE = (37, 16)
"""Rows that fit any page of a check and are no multiple of anything."""

_STALL_S = 0.5
"""How long the device is kept busy where copies cannot be held back."""
_BUSY_SIZE = 4096
_BUSY_CALIBRATION_ROUNDS = 4
_BUSY_MAX_ROUNDS = 4000


@runtime_checkable
class HoldsCopies(Protocol):
    """A simulator that can hold copies back on demand; a real device is kept busy instead."""

    def hold_copies(self) -> AbstractContextManager[None]:
        """No queued copy runs until the block ends."""
        ...


def require(condition: bool, explanation: str) -> None:
    """Fail the check with `explanation` unless `condition` holds.

    Raises:
        AssertionError: it does not hold.
    """
    if not condition:
        raise AssertionError(explanation)


def require_equal(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Fail the check unless both host tensors are equal, element for element; says where they first differ.

    Raises:
        AssertionError: they differ.
    """
    require(
        actual.shape == expected.shape and actual.dtype == expected.dtype,
        f"{what}: expected {tuple(expected.shape)} {expected.dtype}, got {tuple(actual.shape)} {actual.dtype}",
    )
    wrong = (actual != expected).flatten().nonzero()
    if len(wrong):
        first = int(wrong[0])
        raise AssertionError(
            f"{what}: {len(wrong)} of {actual.numel()} elements differ, first element {first}: "
            f"expected {expected.flatten()[first].item()}, got {actual.flatten()[first].item()}"
        )


def rows(tag: int, shape: Sequence[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Host rows in which every element encodes `tag` and its own place, so a misplaced or stale one shows.

    Exact in int32, int64, float32 and float64; narrow types keep the low part, which still tells neighbours apart.
    """
    count = 1
    for size in shape:
        count *= size
    values = (torch.arange(count, dtype=torch.int64) * 31 + tag * 7919) % 8_000_009
    if dtype.is_floating_point and dtype.itemsize < 4:
        values = values % 251
    return values.to(dtype).view(tuple(shape))


class Rig:
    """One backend under test. Used by one check, on one thread unless the check says otherwise."""

    def __init__(self, backend: DeviceBackend, runtime: Runtime) -> None:
        self.backend = backend
        self.runtime = runtime
        self.device = torch.device(backend.device_info().device)
        # A backend may free what nobody references any more; these live as long as the check.
        self._arenas: list[PinnedArena] = []
        self._rings: list[SnapshotRing] = []

    @classmethod
    @contextmanager
    def opened(cls, factory: BackendFactory, runtime: Runtime) -> Iterator[Rig]:
        """Make a backend for the calling thread and close it afterwards; a failed check's own error comes first."""
        backend = factory(runtime)
        try:
            backend.bind_thread()
            rig = cls(backend, runtime)
            yield rig
            rig.free()
        except BaseException:
            with suppress(Exception):
                backend.close()
            raise
        backend.close()

    def free(self) -> None:
        """Close what `page`, `ring` and `ring_slot` allocated; no copy may still use it."""
        for arena in self._arenas:
            arena.close()
        for ring in self._rings:
            ring.close()

    @property
    def copies_can_be_pending(self) -> bool:
        """Whether `stalled` can keep a copy from being done when `copy_to_host` returns."""
        stalls = isinstance(self.backend, HoldsCopies) or self.device.type != "cpu"
        return self.backend.capabilities.async_copy and stalls

    def page(self, nbytes: int) -> ByteCarver:
        """A carver over a fresh arena."""
        self._arenas.append(self.backend.pinned_arena(nbytes))
        return ByteCarver(self._arenas[-1].buffer)

    def ring_slot(self, nbytes: int) -> ByteCarver:
        """A carver over a fresh device buffer."""
        return self.ring(1, nbytes).slot(0)

    def ring(self, depth: int, nbytes: int) -> SnapshotRing:
        """A fresh ring on the device."""
        self._rings.append(self.backend.snapshot_ring(depth, nbytes, self.device))
        return self._rings[-1]

    def stream(self, name: str = "copy") -> Stream:
        """A fresh stream."""
        return self.backend.new_stream(f"conformance-{name}")

    def on_device(self, host_rows: torch.Tensor) -> torch.Tensor:
        """The same rows in fresh device memory, written on the current stream."""
        device_rows = torch.empty(host_rows.shape, dtype=host_rows.dtype, device=self.device)
        device_rows.copy_(host_rows)
        return device_rows

    @contextmanager
    def stalled(self) -> Iterator[None]:
        """Copies queued inside are not done before the block ends, or for about half a second on a real device."""
        if isinstance(self.backend, HoldsCopies):
            with self.backend.hold_copies():
                yield
        else:
            self.keep_busy(_STALL_S)
            yield

    def keep_busy(self, seconds: float) -> None:
        """Queue about `seconds` of work on the current stream; nothing where that stream is the caller itself."""
        if self.device.type == "cpu":
            return
        left = torch.ones((_BUSY_SIZE, _BUSY_SIZE), device=self.device)
        out = torch.empty_like(left)
        current = self.backend.current_stream()
        torch.mm(left, left, out=out)
        current.record().synchronize(WAIT_S)
        started_s = self.runtime.monotonic_s()
        for _ in range(_BUSY_CALIBRATION_ROUNDS):
            torch.mm(left, left, out=out)
        current.record().synchronize(WAIT_S)
        round_s = (self.runtime.monotonic_s() - started_s) / _BUSY_CALIBRATION_ROUNDS
        for _ in range(min(_BUSY_MAX_ROUNDS, int(seconds / max(round_s, 1e-6)) + 1)):
            torch.mm(left, left, out=out)


Check = Callable[[Rig], None]
"""Tries one property; its docstring is the requirement. Raises `AssertionError` with what was expected and seen."""
