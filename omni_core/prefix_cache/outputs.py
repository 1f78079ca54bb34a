# SPDX-License-Identifier: Apache-2.0
"""What `materialize` gives back: rows per request, failures per request, and buffers that can be returned."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from omni_core.prefix_cache.config import HIDDEN_KEY
from omni_core.prefix_cache.errors import RequestError, UnknownKeyError

TokenRange = tuple[int, int]
"""Token positions `[start, stop)` of one request."""


@dataclass(slots=True)
class RequestRows:
    """The rows one step delivers for one request. To be read only; not frozen, which would cost each request a µs.

    Row `i` of every tensor in `rows` belongs to the `i`-th position of `ranges`, in order. A prefix hit is joined in
    front of the rows the step computed, so the first delivery of a request starts at position 0. A step that only
    computed rows again, after a preemption, delivers none: `ranges` is empty then.
    """

    req_id: str
    ranges: tuple[TokenRange, ...]
    """Positions delivered, ascending and disjoint. Never delivered before, and never again."""
    rows: Mapping[str, torch.Tensor]
    """Key → CPU tensor `(num_rows, *trailing)` in the dtype the engine computed. Valid until `release`."""
    key_ranges: Mapping[str, tuple[TokenRange, ...]] = field(default_factory=dict)
    """Keys whose rows cover other positions than `ranges` (a policy without full hidden states), with those."""
    zero_ranges: Mapping[str, tuple[TokenRange, ...]] = field(default_factory=dict)
    """Keys with positions behind a hit for which no row was ever stored: those rows read zeros. Never hidden rows."""
    leftovers: Mapping[str, Any] = field(default_factory=dict)
    """Outputs that have no row per token: the request's list element, its entry, or the whole value."""

    @property
    def num_rows(self) -> int:
        """How many token positions are delivered."""
        return sum(stop - start for start, stop in self.ranges)

    @property
    def hidden_states(self) -> torch.Tensor:
        """`rows[HIDDEN_KEY]`, `(num_rows, hidden_size)`.

        Raises:
            UnknownKeyError: the stage keeps no hidden rows.
        """
        return self[HIDDEN_KEY]

    def __getitem__(self, key: str) -> torch.Tensor:
        """`rows[key]`.

        Raises:
            UnknownKeyError: no such key; names those there are.
        """
        try:
            return self.rows[key]
        except KeyError:
            known = ", ".join(sorted(map(repr, self.rows))) or "none"
            raise UnknownKeyError(
                f"request {self.req_id!r} has no rows under key {key!r}; keys delivered: {known}"
            ) from None

    def ranges_of(self, key: str) -> tuple[TokenRange, ...]:
        """The positions that `rows[key]` covers."""
        return self.key_ranges.get(key, self.ranges)


class StageCacheOutputs(Mapping[str, RequestRows]):
    """One step's deliveries: request id → rows, for every request that could be served.

    `failed` holds the others with their typed error. `release()` gives recycled buffers back; after it the tensors must
    not be read. Without it the rows are the caller's for good.
    """

    __slots__ = ("_acknowledge", "_release", "_served", "failed", "step_id")

    def __init__(
        self,
        step_id: int,
        served: Mapping[str, RequestRows],
        failed: Mapping[str, RequestError],
        release: Callable[[], None],
        acknowledge: Callable[[Iterable[str] | None], None] | None = None,
    ) -> None:
        self.step_id = step_id
        self.failed = failed
        self._served = served
        self._release: Callable[[], None] | None = release
        self._acknowledge = acknowledge

    def __getitem__(self, req_id: str) -> RequestRows:
        """The rows of one request.

        Raises:
            RequestError: the request is in `failed`; its error is raised.
            KeyError: the request was not asked for.
        """
        error = self.failed.get(req_id)
        if error is not None:
            raise error
        return self._served[req_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._served)

    def __len__(self) -> int:
        return len(self._served)

    def acknowledge(self, req_ids: Iterable[str] | None = None) -> None:
        """Say that these requests' rows have arrived, by default all. Any thread; never blocks long.

        Needed with `Delivery.TWO_PHASE` only, before `release`; else, and a second time, it does nothing.

        Raises:
            RequestNotInStepError: no rows of the request were handed over by this step.
            StepOrderError: the outputs were released first, so the rows are owed again.
        """
        if self._acknowledge is not None:
            self._acknowledge(req_ids)

    def release(self) -> None:
        """Give the buffers back for reuse. Any thread; never blocks long. A second call does nothing.

        With `Delivery.TWO_PHASE`, rows that were not acknowledged by now come again with a later step.
        """
        release, self._release = self._release, None
        if release is not None:
            release()


@dataclass(frozen=True, slots=True)
class PartialRequest:
    """A request that ended while rows promised to it were never delivered (their steps were discarded or failed)."""

    req_id: str
    missing: tuple[TokenRange, ...]
