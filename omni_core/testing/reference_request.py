# SPDX-License-Identifier: Apache-2.0
"""What the reference cache keeps of a request and of a saved step: sets of positions, dictionaries of single rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from omni_core.prefix_cache.errors import RequestError
from omni_core.prefix_cache.outputs import TokenRange

Rows = dict[str, torch.Tensor]
"""One token's rows by key."""


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One content version of one life of a request id."""

    req_id: str
    life: int
    """The same for every version of one life."""
    adapter_id: int
    block_ids: list[int] = field(default_factory=list)
    withheld: set[int] = field(default_factory=set)
    """Indices of blocks of its hit that may hold another content than its own."""
    promised: set[int] = field(default_factory=set)
    owed: set[int] = field(default_factory=set)
    """Promised positions that no open step carries and nobody has got."""
    computed_upto: int = 0
    has_drafts: bool = False
    """Whether its last run had drafts and no later event or run says how many were accepted."""
    error: RequestError | None = None
    ended: bool = False
    replaced: bool = False

    def reject_from(self, position: int) -> None:
        """Rows at or after `position` were of rejected drafts: they were never promised."""
        self.promised = {promised for promised in self.promised if promised < position}
        self.owed = {owed for owed in self.owed if owed < position}


@dataclass(slots=True)
class Share:
    """One request's part of a saved step."""

    request: LiveRequest
    stop: int
    """After the last position of its run, drafts included."""
    num_drafts: int
    rows: dict[int, Rows]
    """Position → rows the step carries, drafts included."""
    leftovers: dict[str, Any]
    error: RequestError | None
    """Why the request could not be served when the step was saved."""

    def clip(self, count: int | None) -> None:
        """Drop the rows of rejected drafts: `count` tokens were sampled, and all but the last were drafts."""
        if self.num_drafts and count is not None:
            valid_stop = self.stop - self.num_drafts - 1 + count
            self.rows = {position: rows for position, rows in self.rows.items() if position < valid_stop}


def ranges_of(positions: Sequence[int]) -> tuple[TokenRange, ...]:
    """Ascending positions as ranges."""
    ranges: list[TokenRange] = []
    for position in positions:
        if ranges and ranges[-1][1] == position:
            ranges[-1] = (ranges[-1][0], position + 1)
        else:
            ranges.append((position, position + 1))
    return tuple(ranges)


def owe_again(request: LiveRequest, positions: Iterable[int]) -> None:
    """These rows did not arrive; those of rejected drafts were never promised."""
    if not request.replaced and request.error is None:
        request.owed |= request.promised.intersection(positions)
