# SPDX-License-Identifier: Apache-2.0
"""What the conformance checks stand on: a fresh backend, rows that say where they belong, and a way to stall copies."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Protocol, runtime_checkable

import torch

from omni_core.backend.base import DeviceBackend, PinnedArena, SnapshotRing, Stream
from omni_core.backend.memory import ByteCarver, aligned_nbytes, tensor_nbytes
from omni_core.runtime import Runtime

BackendFactory = Callable[[Runtime], DeviceBackend]
"""Makes a fresh backend whose threads, locks and waits go through the given runtime."""

MIB = 1 << 20
WAIT_S = 30.0
"""How long a check waits for something that must come."""
SMALL_SHAPE = (37, 16)
"""Rows that fit any page of a check and are no multiple of anything."""
LARGE_SHAPE = (512, 1024)
"""2 MiB of int32: a copy that takes a moment."""
UNWRITTEN = -1
"""What destinations hold before a copy; no element of `rows` is negative."""

_STALL_S = 0.5
"""How long the device is kept busy where copies cannot be held back."""
_BUSY_SIZE = 4096
_BUSY_CALIBRATION_ROUNDS = 4
_BUSY_MAX_ROUNDS = 1000
"""Devices hold some 1,024 kernels back; the next one would block the caller."""
_AHEAD_NBYTES = 64 * MIB
_AHEAD_COPIES = 8
"""Half a GiB: some 10 ms of copying over PCIe 5."""


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
    """Fail the check unless both host tensors are equal, bit for bit; says where they first differ.

    Raises:
        AssertionError: they differ.
    """
    require(
        actual.shape == expected.shape and actual.dtype == expected.dtype,
        f"{what}: expected {tuple(expected.shape)} {expected.dtype}, got {tuple(actual.shape)} {actual.dtype}",
    )
    wrong = (_element_bytes(actual) != _element_bytes(expected)).any(dim=1).nonzero()
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
    values = (torch.arange(math.prod(shape), dtype=torch.int64) * 31 + tag * 7919) % 8_000_009
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
        self._ahead: tuple[torch.Tensor, torch.Tensor] | None = None

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
        return self.backend.capabilities.async_copy and (self._holds_copies or self._is_accelerator)

    def page(self, nbytes: int) -> ByteCarver:
        """A carver over a fresh arena."""
        self._arenas.append(self.backend.pinned_arena(nbytes))
        return ByteCarver(self._arenas[-1].buffer)

    def destination(self, shape: Sequence[int]) -> torch.Tensor:
        """int32 `shape` in a fresh arena, every element `UNWRITTEN`."""
        nbytes = aligned_nbytes(tensor_nbytes(shape, torch.int32))
        place = self.page(nbytes).take(shape, torch.int32)
        return place.fill_(UNWRITTEN)

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
        """The same rows in fresh device memory, written on the current stream by torch alone. Blocks on a device."""
        device_rows = torch.empty(host_rows.shape, dtype=host_rows.dtype, device=self.device)
        device_rows.copy_(host_rows)
        return device_rows

    def run_beside(self, *targets: Callable[[], None]) -> None:
        """Run each target on a bound thread of its own, all at a time, and wait for all of them.

        Raises:
            AssertionError: one did not end.
            BaseException: the first one that a target raised.
        """
        failures: list[BaseException] = []

        def bound(target: Callable[[], None]) -> Callable[[], None]:
            def run() -> None:
                try:
                    self.backend.bind_thread()
                    target()
                except BaseException as error:  # carried to the check's thread, whatever it is
                    failures.append(error)

            return run

        threads = [self.runtime.spawn(f"conformance-{number}", bound(target)) for number, target in enumerate(targets)]
        stuck = [thread.name for thread in threads if not thread.join(WAIT_S)]
        require(not stuck, f"threads {stuck} did not end within {WAIT_S} s")
        if failures:
            raise failures[0]

    @contextmanager
    def stalled(self) -> Iterator[None]:
        """Copies queued inside are not done before the block ends, or for about half a second on a real device.

        Make what a check needs beforehand: on a real device an allocation or a copy to it inside ends the stall.
        """
        if isinstance(self.backend, HoldsCopies):
            with self.backend.hold_copies():
                yield
        else:
            if self._is_accelerator:
                self._make_ahead()
            self.keep_busy(_STALL_S)
            yield

    def keep_busy(self, seconds: float) -> None:
        """Queue about `seconds` of work on the current stream; nothing where that stream is the caller itself."""
        if not self._is_accelerator:
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

    def delay(self, stream: Stream) -> None:
        """Give `stream` other copies to do first: what it is given next comes after the current stream's next work.

        Nothing on a simulator, which holds copies back instead, or where the caller is the stream.
        """
        if self._is_accelerator and not self._holds_copies:
            destination, source = self._make_ahead()
            for _ in range(_AHEAD_COPIES):
                self.backend.copy_to_host(destination, source, stream)

    @property
    def _is_accelerator(self) -> bool:
        return self.device.type != "cpu"

    @property
    def _holds_copies(self) -> bool:
        return isinstance(self.backend, HoldsCopies)

    def _make_ahead(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Where `delay` copies to and from."""
        if self._ahead is None:
            source = torch.zeros(_AHEAD_NBYTES, dtype=torch.uint8, device=self.device)
            self._ahead = (self.page(_AHEAD_NBYTES).take((_AHEAD_NBYTES,), torch.uint8), source)
        return self._ahead


def _element_bytes(host_rows: torch.Tensor) -> torch.Tensor:
    """`(numel, itemsize)` uint8."""
    return host_rows.contiguous().view(torch.uint8).view(host_rows.numel(), host_rows.element_size())


Check = Callable[[Rig], None]
"""Tries one requirement, which its docstring states. Raises `AssertionError` with what was expected and seen."""
