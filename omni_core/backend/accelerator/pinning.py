# SPDX-License-Identifier: Apache-2.0
"""How a vendor page-locks host memory: exactly, by registering what we reserved, or by torch's allocator, rounded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from omni_core.backend.errors import BackendFeatureUnsupportedError
from omni_core.backend.pinned_pieces import PinnedPieces, PinRange


class PinnedMemory(Protocol):
    """One page-locked range."""

    @property
    def buffer(self) -> torch.Tensor | None:
        """uint8 CPU tensor `(nbytes,)`; `None` once closed."""
        ...

    @property
    def pinned_bytes(self) -> int:
        """Bytes page-locked for it now."""
        ...

    def close(self) -> None:
        """Unlock and drop it. Idempotent. If the driver refuses, it stays whole, and raises."""
        ...


class HostPinning(Protocol):
    """Makes page-locked ranges."""

    @property
    def exact(self) -> bool:
        """Whether exactly the asked bytes are page-locked, in pieces if wanted."""
        ...

    def pin(self, nbytes: int, chunk_bytes: int) -> PinnedMemory:
        """One range of `nbytes`; `chunk_bytes` as in `DeviceBackend.pinned_arena`."""
        ...


@dataclass(frozen=True, slots=True)
class RegisteredPinning:
    """Reserves memory and registers it with the driver, piece by piece."""

    register: PinRange
    """Page-locks `(address, nbytes)`; raises `MemoryError` when the driver refuses."""
    unregister: PinRange
    """The reverse; raises `BackendError` when the driver refuses."""

    @property
    def exact(self) -> bool:
        return True

    def pin(self, nbytes: int, chunk_bytes: int) -> PinnedPieces:
        """One range of `nbytes`.

        Raises:
            MemoryError: the operating system or the driver refused; names the sizes. Nothing is left.
            ValueError: `chunk_bytes` is not whole pages.
        """
        return PinnedPieces(nbytes, chunk_bytes, self.register, self.unregister)


@dataclass(frozen=True, slots=True)
class AllocatedPinning:
    """Takes page-locked memory from torch, where the vendor's module cannot register ours.

    torch rounds up to a power of two (`at::CachingHostAllocator`; faults.md, row 87), and keeps what is given back for
    its next allocation of that size.
    """

    missing: str
    """What the vendor's module lacks, and from which version on it has it, for messages."""

    @property
    def exact(self) -> bool:
        return False

    def pin(self, nbytes: int, chunk_bytes: int) -> AllocatedRange:
        """One range of `nbytes`.

        Raises:
            MemoryError: torch or the driver refused; names the sizes.
            BackendFeatureUnsupportedError: it would have to be page-locked in pieces.
        """
        if 0 < chunk_bytes < nbytes:
            raise BackendFeatureUnsupportedError(
                f"pinned_arena({nbytes}): without {self.missing} one range cannot be page-locked in pieces of "
                f"pin_chunk_bytes={chunk_bytes}; set pin_chunk_bytes to 0 if the driver takes so much at once, or ask "
                "for less (max_num_tokens, extra_row_bytes)"
            )
        return AllocatedRange(nbytes)


class AllocatedRange:
    """A range of torch's page-locked memory."""

    def __init__(self, nbytes: int) -> None:
        self._pinned_bytes = 1 << (nbytes - 1).bit_length()
        try:
            # An inference tensor could not be written by threads outside inference mode. `Tensor.pin_memory` is not
            # used: vLLM's CPU worker replaces it by a function that does nothing.
            with torch.inference_mode(False):
                buffer = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except (RuntimeError, MemoryError) as error:
            raise MemoryError(
                f"torch was refused {self._pinned_bytes} bytes of page-locked memory for an arena of {nbytes} ({error})"
            ) from error
        self._buffer: torch.Tensor | None = buffer

    @property
    def buffer(self) -> torch.Tensor | None:
        """uint8 CPU tensor `(nbytes,)`; `None` once closed."""
        return self._buffer

    @property
    def pinned_bytes(self) -> int:
        """Bytes page-locked for it: `nbytes` rounded up to a power of two; 0 once closed."""
        return self._pinned_bytes

    def close(self) -> None:
        """Give it back to torch. Idempotent."""
        self._buffer = None
        self._pinned_bytes = 0
