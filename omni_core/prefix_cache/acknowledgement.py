# SPDX-License-Identifier: Apache-2.0
"""Two-phase delivery: rows count as delivered once the consumer says so, and are owed again if it never does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from omni_core.prefix_cache.errors import RequestNotInStepError, StepOrderError
from omni_core.prefix_cache.owed import Positions
from omni_core.prefix_cache.requests import RequestTable
from omni_core.prefix_cache.state import CacheState


@dataclass(slots=True)
class DeliveryCounts:
    """Token positions delivered so far. Guarded by the state lock."""

    rows: int = 0
    rows_from_hits: int = 0
    """Of `rows`, those delivered from stored rows."""


@dataclass(frozen=True, slots=True)
class HandedOver:
    """One request's rows in the consumer's hands."""

    serial: int
    positions: Positions
    num_from_hits: int
    carried_owed: bool
    """Whether rows that were owed before are among them."""


class UnacknowledgedRows:
    """What one materialised step handed over and nobody has acknowledged yet. Any thread; takes the state lock."""

    def __init__(
        self,
        step: str,
        state: CacheState,
        requests: RequestTable,
        counts: DeliveryCounts,
        handed_over: Mapping[str, HandedOver],
    ) -> None:
        self._step = step
        self._state = state
        self._requests = requests
        self._counts = counts
        self._waiting = dict(handed_over)
        self._all = frozenset(handed_over)
        self._released = False

    def acknowledge(self, req_ids: Iterable[str] | None) -> None:
        """These requests' rows have arrived (`None`: all). Acknowledging twice does nothing.

        Raises:
            RequestNotInStepError: rows of the request were not handed over by this step; nothing was changed.
            StepOrderError: the outputs were released before; what was not acknowledged by then is owed again.
        """
        chosen = self._all if req_ids is None else frozenset(req_ids)
        strangers = chosen - self._all
        if strangers:
            raise RequestNotInStepError(
                f"{self._step}: cannot acknowledge request {min(strangers)!r}; rows were handed over for "
                f"{', '.join(map(repr, sorted(self._all))) or 'no request'}"
            )
        with self._state.lock:
            late = self._released and not chosen.isdisjoint(self._waiting)
            if not late:
                arrived = chosen & self._waiting.keys()
                for req_id in arrived:
                    rows = self._waiting.pop(req_id)
                    self._counts.rows += len(rows.positions)
                    self._counts.rows_from_hits += rows.num_from_hits
                self._requests.missing.delivered(arrived)
        if late:
            raise StepOrderError(
                f"{self._step}: its outputs were released before they were acknowledged, so their rows are owed again; "
                "acknowledge first"
            )

    def give_up(self) -> None:
        """The outputs were released: what was not acknowledged is owed to its request again."""
        with self._state.lock:
            if self._released:
                return
            self._released = True
            for req_id, rows in self._waiting.items():
                self._requests.owe(req_id, rows.serial, rows.positions)
                if rows.carried_owed and self._requests.serial(req_id) == rows.serial:
                    self._requests.missing.back_off(req_id)
