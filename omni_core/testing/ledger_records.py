# SPDX-License-Identifier: Apache-2.0
"""The ledger's pages: blocks with the rows that lie in them, contents of requests, and what each step owes to whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from omni_core.testing.engine_schedule import ScheduledRun
from omni_core.testing.sim_request import TokenTrack
from omni_core.testing.tap import PrefixDigest, PrefixDigester


@dataclass(frozen=True, slots=True)
class StoredRow:
    """One row of one key in one slot."""

    digest: PrefixDigest
    """Of the token prefix it was computed for."""
    step: int
    copied: bool = False
    adapter_id: int = 0
    """Of the request that computed it."""
    unsettled: bool = False
    """Whether its request ended, or was replaced, before a run or an event said which of its drafts were accepted: this
    row may be of a rejected one, as far as the cache was told."""


@dataclass(slots=True)
class LedgerBlock:
    """One KV block in its present tenancy."""

    tenancy: int = 0
    stored: dict[int, dict[str, StoredRow]] = field(default_factory=dict)
    """Offset in the block → key → the row; this tenancy only."""
    previous_keys: frozenset[str] | None = None
    """Keys the tenant before stored, `None` if there was none."""
    private_to: ContentRecord | None = None
    """The content of a replaced request that kept the block in part, while others may find it under an old hash."""
    old_offsets: set[int] = field(default_factory=set)
    """Where a hidden row of weights that have changed since would be found."""
    has_digest: bool = False
    """Whether the cache was told the digest of this tenancy."""
    copied_from_private: bool = False
    """Whether its rows came from such a block: no digest stands for what was copied."""
    doubtful_for: set[int] = field(default_factory=set)
    """Lives that hit it while the cache could not know whether its rows are theirs, or knew that they are not. It may
    keep what is right among them from these lives as long as the tenancy lasts."""

    def keys(self) -> frozenset[str]:
        """Every key with a row here."""
        return frozenset(key for rows in self.stored.values() for key in rows)


class Standing(Enum):
    """Where a content stands."""

    LIVE = "live"
    REPLACED = "replaced"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class ContentRecord:
    """One content version of one life of a request id, and what became of its rows."""

    track: TokenTrack
    life: int
    """Counts lives of request ids: an id that is used again after its end begins another."""
    version: int
    """0 for what the request started with; one more with each replacement."""
    hit: int
    """Most positions that a start, resumption or replacement said were computed."""
    digester: PrefixDigester
    drafted: list[int] = field(default_factory=list)
    """Positions of its last run that were computed for drafts, until a run or an event says which were accepted."""
    block_ids: tuple[int, ...] = ()
    """Its table at its last run."""
    standing: Standing = Standing.LIVE
    replaced_in: int | None = None
    """Number of the schedule that announced its replacement."""
    promised: set[int] = field(default_factory=set)
    """Positions that some saved step owes."""
    delivered: set[int] = field(default_factory=set)
    chunked: set[int] = field(default_factory=set)
    """Positions of a prompt that was computed in several runs."""
    failed_in: int | None = None
    """Number of the schedule from which on it can never be served."""
    failure_counted: bool = False
    doubtful_from: int | None = None
    """Number of the schedule from which on the cache may, but need not, refuse it."""
    refused_from: int | None = None
    """Number of the first schedule it refused for such a doubt, as far as answers were seen."""
    served_upto: int = -1
    """Number of the last schedule it served in spite of it."""

    def digests(self, positions: Sequence[int]) -> list[PrefixDigest]:
        """The tap's digest of each position's whole prefix; `positions` ascend."""
        if not positions:
            return []
        stop = positions[-1] + 1
        self.digester.extend(content_bytes(self.track, len(self.digester), stop))
        return [self.digester[position] for position in positions]

    def undelivered(self) -> set[int]:
        """Positions promised and not delivered for good."""
        return self.promised - self.delivered


def content_bytes(track: TokenTrack, start: int, stop: int) -> list[bytes]:
    """What stands at positions `[start, stop)`, as a digester takes it."""
    return [repr(content).encode() for content in track.content(start, stop)]


def digester_of(track: TokenTrack) -> PrefixDigester:
    """An empty digester for a content."""
    return PrefixDigester(track.request.salt.encode())


@dataclass(frozen=True, slots=True)
class HitFact:
    """Where one position of a prefix hit came from, when the step that reads it was saved."""

    same_step: bool
    recycled: bool
    copied: bool
    block_id: int
    tenancy: int


@dataclass(slots=True)
class StepDue:
    """What one saved step owes to one request."""

    content: ContentRecord
    number: int
    """The schedule's number."""
    run: ScheduledRun
    valid_stop: int
    """After the last position of the run that is not a rejected draft."""
    due: list[int]
    """Positions no earlier step promised, ascending: the step must deliver them."""
    resumed: bool
    """The request had promised rows already when positions of a hit came due."""
    keys_at: dict[int, frozenset[str]]
    """Every position the step could deliver → keys with a row of the right content."""
    facts: dict[int, HitFact]
    """Positions due from the store."""
    absent: list[int]
    """Positions due from the store with no hidden row of the right content; any: the request can never be served."""
    absent_other_content: int
    """Of those, positions under whose hash a row of other content lies."""
    absent_old_weights: int
    """Of those, positions at which a row of weights lies that have changed since."""
    owed_absent: bool
    """A position of an earlier, undelivered step has no row any more: the cache may refuse the request for it."""

    @property
    def num_recomputed(self) -> int:
        """Rows of the run that earlier steps promised."""
        return self.valid_stop - self.run.start - sum(position >= self.run.start for position in self.due)

    @property
    def num_rejected(self) -> int:
        """Rows of the run that were computed for rejected drafts."""
        return self.run.stop - self.valid_stop
