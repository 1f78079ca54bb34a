# SPDX-License-Identifier: Apache-2.0
"""What a sink says of the requests that an id may stand for, and the rule by which several sinks' answers are one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from omni_core.sinks.base import PossibleSample


class RequestState(Enum):
    """Where a request is."""

    RUNNING = "running"
    ENDED = "ended"
    """Its rows are here."""
    WITHOUT_ROWS = "without_rows"
    """It ended, and its rows are not here."""


@dataclass(frozen=True, slots=True)
class FoundRequest:
    """A request that an id may stand for."""

    req_id: str
    use: int
    client_req_id: str | None
    sample: PossibleSample | None
    has_sibling: bool
    """Whether this sink has seen another sample of the same group."""
    state: RequestState
    no_rows_because: str | None = None
    """Set for `WITHOUT_ROWS`."""


def requests_meant(asked: str, found: Iterable[FoundRequest]) -> tuple[FoundRequest, ...]:
    """Those of the found requests that an id really stands for. Pure; any thread.

    A request that only looks like a sample of `asked` is one once another sample of its group was seen, in any of the
    sinks: with data parallel each sample of one client's request may run in another engine.

    Args:
        asked: the engine's id or the client's.
        found: what the sinks found under it, of all sinks together.
    """
    known = tuple(found)
    indices_seen: defaultdict[str, set[int]] = defaultdict(set)
    for one in known:
        if one.sample is not None:
            indices_seen[one.sample.group].add(one.sample.index)
    return tuple(
        one
        for one in known
        if asked in (one.req_id, one.client_req_id)
        or one.has_sibling
        or (one.sample is not None and len(indices_seen[one.sample.group]) > 1)
    )
