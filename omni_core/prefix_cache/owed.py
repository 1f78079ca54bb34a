# SPDX-License-Identifier: Apache-2.0
"""Rows that were promised to live requests and not delivered: the missing sets of invariant 11."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.int64]
"""`(n,)` token positions of one request, ascending."""

NO_POSITIONS: Positions = np.zeros(0, np.int64)

_MAX_CHUNKS = 64
"""Pieces a set is kept in. A request whose steps are all given up would end with one for each, to be joined on the
engine thread."""


class MissingSets:
    """One set of positions per live request. Every method needs the state lock.

    Where the rows lie is not kept: a request may have been resumed with another block table since. Rows that come back
    undelivered from the step that carried them once more are not planned again until the request gets a step delivered:
    with a consumer that has stalled, each step would read everything missing once more.
    """

    def __init__(self) -> None:
        self._chunks: dict[str, list[Positions]] = {}
        self._backing_off: set[str] = set()

    def add(self, req_id: str, positions: Positions) -> None:
        """These rows were not delivered."""
        chunks = self._chunks.setdefault(req_id, [])
        chunks.append(positions)
        if len(chunks) == _MAX_CHUNKS:
            chunks[:] = [np.concatenate(chunks)]

    def back_off(self, req_id: str) -> None:
        """The step that carried the request's missing rows was not delivered either."""
        self._backing_off.add(req_id)

    def delivered(self, req_ids: Iterable[str]) -> None:
        """The consumer takes rows of these requests again."""
        if self._backing_off:
            self._backing_off.difference_update(req_ids)

    def due(self) -> list[str]:
        """Requests whose missing rows the next step should carry."""
        if not self._chunks:
            return []
        return [req_id for req_id in self._chunks if req_id not in self._backing_off]

    def take_below(self, req_id: str, limit: int) -> Positions:
        """Take the request's missing positions below `limit`, ascending; the others stay missing."""
        chunks = self._chunks.pop(req_id, None)
        if chunks is None:
            return NO_POSITIONS
        positions = np.sort(np.concatenate(chunks))
        count = int(np.searchsorted(positions, limit))
        if count < len(positions):
            self._chunks[req_id] = [positions[count:]]
        return positions[:count]

    def forget(self, req_id: str) -> Positions:
        """The request is over; returns the positions it never got, ascending."""
        self._backing_off.discard(req_id)
        chunks = self._chunks.pop(req_id, None)
        return NO_POSITIONS if chunks is None else np.sort(np.concatenate(chunks))
