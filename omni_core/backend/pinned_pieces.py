# SPDX-License-Identifier: Apache-2.0
"""Host memory that is one range to its user and is page-locked in pieces, for drivers that refuse large ones.

Some drivers refuse a single pin above 2 to 4 GiB, Ascend's above some 200 GB (faults.md, rows 85 and 86). A piece that
is refused ends the attempt: smaller ones are never tried, because a failed pin may cost later ones (row 90).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from omni_core.backend.host_pages import PAGE_BYTES, reserve_pages

PinRange = Callable[[int, int], None]
"""Page-locks, or unlocks, `(address, nbytes)`; the range is whole pages but for its end."""


def piece_sizes(nbytes: int, chunk_bytes: int) -> tuple[int, ...]:
    """Sizes of the pieces of `nbytes`: whole chunks and the rest; one piece if `chunk_bytes` is 0."""
    if chunk_bytes == 0:
        return (nbytes,)
    whole, rest = divmod(nbytes, chunk_bytes)
    return (chunk_bytes,) * whole + ((rest,) if rest else ())


class PinnedPieces:
    """One contiguous range, exactly as long as asked for, all of it page-locked. One owner; not thread-safe."""

    def __init__(self, nbytes: int, chunk_bytes: int, pin: PinRange, unpin: PinRange) -> None:
        """Reserve the range and pin it piece by piece. Slow; start-up only.

        Args:
            nbytes: at least 1.
            chunk_bytes: most bytes of one piece, a multiple of `PAGE_BYTES`; 0: one piece.
            pin: page-locks one piece; raises `MemoryError` when the driver refuses.
            unpin: the reverse; called once per pinned piece, last piece first.

        Raises:
            MemoryError: the operating system or the driver refused; pieces pinned before are unpinned, nothing is left.
            ValueError: `chunk_bytes` is negative or not whole pages.
        """
        if chunk_bytes < 0 or chunk_bytes % PAGE_BYTES:
            raise ValueError(f"chunk_bytes={chunk_bytes}: must be 0 or a multiple of the page of {PAGE_BYTES} bytes")
        self._unpin = unpin
        self._pinned: list[tuple[int, int]] = []
        self._buffer: torch.Tensor | None = reserve_pages(nbytes, overcommit=False)
        sizes = piece_sizes(nbytes, chunk_bytes)
        address = self._buffer.data_ptr()
        try:
            for number, piece_bytes in enumerate(sizes, start=1):
                try:
                    pin(address, piece_bytes)
                except MemoryError as error:
                    raise MemoryError(
                        f"piece {number} of {len(sizes)} of an arena of {nbytes} bytes, {piece_bytes} bytes, was not "
                        f"page-locked: {error}"
                    ) from error
                self._pinned.append((address, piece_bytes))
                address += piece_bytes
        except BaseException:
            self.close()
            raise

    @property
    def buffer(self) -> torch.Tensor | None:
        """uint8 CPU tensor `(nbytes,)`; `None` once closed."""
        return self._buffer

    @property
    def pinned_bytes(self) -> int:
        """Bytes page-locked now: what was asked for, to the byte; 0 once closed."""
        return sum(piece_bytes for _, piece_bytes in self._pinned)

    def close(self) -> None:
        """Unpin every piece and drop the range. No copy may still run into it. Idempotent."""
        while self._pinned:
            self._unpin(*self._pinned[-1])
            self._pinned.pop()
        self._buffer = None
