# SPDX-License-Identifier: Apache-2.0
"""A request's rows as a sink has them: in pieces when it ends, then one tensor per key."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from omni_core.prefix_cache.config import HIDDEN_KEY
from omni_core.prefix_cache.outputs import TokenRange
from omni_core.sinks.base import PossibleSample, RequestEnd, SinkRequestEnd, is_complete
from omni_core.sinks.errors import UnknownRequestError
from omni_core.sinks.sizes import leftover_nbytes, rows_nbytes


@dataclass(frozen=True, slots=True)
class StoredRequest:
    """A whole request as a sink kept it: one tensor per key, rows in the order of their positions."""

    req_id: str
    """The engine's internal id."""
    client_req_id: str | None
    end: RequestEnd
    ranges: tuple[TokenRange, ...]
    """Positions kept, ascending, disjoint and not adjacent: one range for a whole request."""
    missing: tuple[TokenRange, ...]
    """Positions whose hidden rows were not delivered: computed ones, and those of the prompt not computed before the
    end. Of other keys a row may be there."""
    rows: Mapping[str, torch.Tensor]
    """Key → CPU tensor `(num_rows, *trailing)`; row `i` belongs to the `i`-th position of `ranges_of(key)`."""
    token_ids: npt.NDArray[np.int64]
    """`(num_rows,)`: the token at each position of `ranges`."""
    key_ranges: Mapping[str, tuple[TokenRange, ...]] = field(default_factory=dict)
    """Keys that came with some deliveries only, with the positions they cover."""
    leftovers: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Outputs without a row per token: the values in the order they came. Those of a step that was put off are not
    among them, which `missing` and `complete` do not tell."""
    sample: PossibleSample | None = None
    """What the id says if this is one of several samples of one client's request."""
    use: int = 0
    """How many requests of the same engine run had the same internal id before."""

    @property
    def complete(self) -> bool:
        """Whether the request was not aborted and nothing promised to it is missing."""
        return is_complete(self.end, self.missing)

    @property
    def num_rows(self) -> int:
        """How many positions are kept."""
        return sum(stop - start for start, stop in self.ranges)

    @property
    def nbytes(self) -> int:
        """Bytes of the rows, the token ids and the leftovers, the objects of these included."""
        return rows_nbytes(self.rows) + self.token_ids.nbytes + leftover_nbytes(self.leftovers)

    @property
    def positions(self) -> npt.NDArray[np.int64]:
        """`(num_rows,)`: the absolute position of each row."""
        return positions_of(self.ranges)

    @property
    def hidden_states(self) -> torch.Tensor:
        """`rows[HIDDEN_KEY]`, `(n, hidden_size)`: row `i` belongs to the `i`-th position of `ranges_of(HIDDEN_KEY)`.

        Those are the positions of `ranges`, so `n` is `num_rows`, unless other keys came for more positions: a policy
        without full hidden states delivers none behind a prefix hit.

        Raises:
            UnknownRequestError: the stage delivered no hidden rows for this request.
        """
        try:
            return self.rows[HIDDEN_KEY]
        except KeyError:
            keys = ", ".join(sorted(map(repr, self.rows))) or "none"
            raise UnknownRequestError(f"request {self.req_id!r} has no hidden rows; keys kept: {keys}") from None

    def ranges_of(self, key: str) -> tuple[TokenRange, ...]:
        """The positions that `rows[key]` covers."""
        return self.key_ranges.get(key, self.ranges)


def positions_of(ranges: Iterable[TokenRange]) -> npt.NDArray[np.int64]:
    """Every position of `ranges`, in order, as one array."""
    runs = [np.arange(start, stop, dtype=np.int64) for start, stop in ranges]
    return np.concatenate(runs) if runs else np.empty(0, dtype=np.int64)


def merge_ranges(ranges: Iterable[TokenRange]) -> tuple[TokenRange, ...]:
    """Ascending, disjoint ranges with adjacent ones made one."""
    merged: list[TokenRange] = []
    for start, stop in ranges:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)


@dataclass(frozen=True, slots=True)
class CollectedRequest:
    """An ended request, not yet joined: per key its pieces in the order of their positions."""

    end: SinkRequestEnd
    ranges: tuple[TokenRange, ...]
    pieces: Mapping[str, Sequence[torch.Tensor]]
    """Key → contiguous CPU tensors that follow each other; at least one per key."""
    token_id_pieces: Sequence[npt.NDArray[np.int64]]
    key_ranges: Mapping[str, tuple[TokenRange, ...]]
    leftovers: Mapping[str, tuple[Any, ...]]

    @property
    def num_rows(self) -> int:
        """How many positions were delivered."""
        return sum(stop - start for start, stop in self.ranges)

    def join(self) -> StoredRequest:
        """One tensor per key. Copies every row once."""
        return StoredRequest(
            req_id=self.end.req_id,
            client_req_id=self.end.client_req_id,
            end=self.end.end,
            ranges=self.ranges,
            missing=self.end.missing,
            rows={key: torch.cat(tuple(pieces)) for key, pieces in self.pieces.items()},
            token_ids=np.concatenate(self.token_id_pieces) if self.token_id_pieces else np.empty(0, dtype=np.int64),
            key_ranges=self.key_ranges,
            leftovers=self.leftovers,
            sample=self.end.sample,
            use=self.end.use,
        )
