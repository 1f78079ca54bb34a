# SPDX-License-Identifier: Apache-2.0
"""Rows that were promised to live requests and not delivered: the missing sets of invariant 11."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from omni_core.prefix_cache.slot_table import Slots


@dataclass(frozen=True, slots=True)
class OwedRows:
    """Rows a request still has to get."""

    positions: npt.NDArray[np.int64]
    slots: Slots
    """Where the rows were stored; -1 where they never were."""
    since: int
    """The last id given out when the rows were planned or claimed. A tenancy that began later holds other rows."""


class MissingSets:
    """One set per live request. Every method needs the state lock.

    Rows that come back undelivered from the step that carried them once more are not planned again until the request
    gets a step delivered: with a consumer that has stalled, each step would read everything missing once more.
    """

    def __init__(self) -> None:
        self._chunks: dict[str, list[OwedRows]] = {}
        self._backing_off: set[str] = set()

    def add(self, req_id: str, rows: OwedRows) -> None:
        """These rows were not delivered."""
        self._chunks.setdefault(req_id, []).append(rows)

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

    def take(self, req_id: str) -> list[OwedRows]:
        """Take a request's missing set, in the order it was added; it has none any more."""
        return self._chunks.pop(req_id, [])

    def forget(self, req_id: str) -> npt.NDArray[np.int64]:
        """The request is over; returns the positions it never got, ascending."""
        self._backing_off.discard(req_id)
        chunks = self.take(req_id)
        return np.sort(np.concatenate([chunk.positions for chunk in chunks])) if chunks else np.zeros(0, np.int64)
