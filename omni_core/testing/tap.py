# SPDX-License-Identifier: Apache-2.0
"""The independent witness: every row a forward really computed, kept by token-prefix digest, position and key.

It shares no code and no memory with the cache. A delivered row that equals the tap's row under the same digest,
position and key is a row this very run computed for that prefix; a row the tap does not know was never computed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

PrefixDigest = bytes
"""Digest of everything a row depends on: all tokens up to and including its position."""


class PrefixDigester:
    """Digests of the growing prefixes of one request, each computed once."""

    __slots__ = ("_digests", "_state")

    def __init__(self, salt: bytes = b"") -> None:
        self._state = hashlib.sha256(salt)
        self._digests: list[PrefixDigest] = []

    def extend(self, contents: Iterable[bytes]) -> None:
        """Append what stands at the next positions, one `bytes` each."""
        for content in contents:
            self._state.update(len(content).to_bytes(4, "little"))
            self._state.update(content)
            self._digests.append(self._state.digest())

    def __len__(self) -> int:
        return len(self._digests)

    def __getitem__(self, position: int) -> PrefixDigest:
        """The digest of positions 0 to `position`, both included."""
        return self._digests[position]


class TapEntry(NamedTuple):
    """Where a row was computed."""

    digest: PrefixDigest
    position: int
    key: str


class RowTap:
    """Keeps the bytes of every row given to `record`. One thread at a time.

    Two forwards may compute a row of one prefix twice, with different bytes where a model depends on its batch. All are
    kept; a delivered row is right if it equals one of them.
    """

    def __init__(self) -> None:
        self._rows: dict[TapEntry, list[bytes]] = {}
        self._num_rows = 0

    @property
    def num_rows(self) -> int:
        """Rows recorded, repeats included."""
        return self._num_rows

    def record(self, key: str, digests: Sequence[PrefixDigest], positions: Sequence[int], rows: torch.Tensor) -> None:
        """Copy `rows` `(len(positions), …)`, one per digest and position. Blocks until the rows are on the host."""
        for row, digest, position in zip(row_bytes(rows), digests, positions, strict=True):
            kept = self._rows.setdefault(TapEntry(digest, int(position), key), [])
            self._num_rows += 1
            if row not in kept:
                kept.append(row)

    def knows(self, key: str, digest: PrefixDigest, position: int) -> bool:
        """Whether some forward computed that row."""
        return TapEntry(digest, position, key) in self._rows

    def equal(
        self, key: str, digests: Sequence[PrefixDigest], positions: Sequence[int], rows: torch.Tensor
    ) -> npt.NDArray[np.bool_]:
        """`(len(positions),)`: whether each delivered row equals, bit for bit, one that was computed for its prefix."""
        found = (
            row in self._rows.get(TapEntry(digest, int(position), key), ())
            for row, digest, position in zip(row_bytes(rows), digests, positions, strict=True)
        )
        return np.fromiter(found, np.bool_, len(positions))

    def find(self, row: torch.Tensor) -> tuple[TapEntry, ...]:
        """Every place where a row of these bytes was computed: whose row a misplaced one really is. Slow."""
        wanted = row_bytes(row[None])[0]
        return tuple(entry for entry, kept in self._rows.items() if wanted in kept)


def row_bytes(rows: torch.Tensor) -> list[bytes]:
    """The bytes of each row of `rows`, which has at least one element per row."""
    flat = rows.detach().cpu().contiguous().view(rows.shape[0], -1).view(torch.uint8)
    blob, width = flat.numpy().tobytes(), flat.shape[1]
    return [blob[start : start + width] for start in range(0, len(blob), width)]
