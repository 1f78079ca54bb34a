# SPDX-License-Identifier: Apache-2.0
"""Writes down, from the engine's own words alone, which rows exist in which slot and what is promised to whom.

A dictionary of slots and one small record per request: no threads, no copies, no arithmetic shared with the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from omni_core.prefix_cache.config import HIDDEN_KEY
from omni_core.prefix_cache.events import RequestEvent, RequestEventKind
from omni_core.testing.sim_engine import Forward, SavedStep
from omni_core.testing.sim_request import TokenTrack
from omni_core.testing.sim_scheduler import SimSchedule
from omni_core.testing.tap import PrefixDigest, PrefixDigester, RowTap


@dataclass(slots=True)
class _StoredRow:
    step: int
    copied: bool = False


@dataclass(slots=True)
class _Block:
    tenancy: int = 0
    stored: dict[int, dict[str, _StoredRow]] = field(default_factory=dict)
    """Offset in the block → key → where the row came from; this tenancy only."""
    previous_keys: frozenset[str] | None = None
    """Keys the tenant before stored, `None` if there was none."""

    def keys(self) -> frozenset[str]:
        return frozenset(key for rows in self.stored.values() for key in rows)


@dataclass(slots=True)
class RequestRecord:
    """What the ledger knows of a request."""

    track: TokenTrack
    digester: PrefixDigester
    block_ids: list[int]
    hit: int
    keys_at: list[frozenset[str]] = field(default_factory=list)
    """Per position: every key that a forward stored for it, the hidden key included."""
    hit_facts: list[HitFact] = field(default_factory=list)
    promised_upto: int = 0
    delivered: set[int] = field(default_factory=set)
    chunked: set[int] = field(default_factory=set)
    absent: int = 0
    """Positions of the hit with no hidden row; more than 0: the request can never be served."""
    failure_reported: bool = False

    def digests(self, positions: Sequence[int]) -> list[PrefixDigest]:
        """The tap's digest of each position's whole prefix; `positions` ascend."""
        stop = positions[-1] + 1
        self.digester.extend(repr(content).encode() for content in self.track.content(len(self.digester), stop))
        return [self.digester[position] for position in positions]


@dataclass(frozen=True, slots=True)
class HitFact:
    """Where one position of a prefix hit came from, when its first step was saved."""

    same_step: bool
    recycled: bool
    copied: bool
    block_id: int
    tenancy: int


class EngineLedger:
    """Follows one engine, as a `StepObserver`. Engine thread only.

    Args:
        block_size: tokens per block.
        tap: is given every row a forward computed.
    """

    def __init__(self, block_size: int, tap: RowTap) -> None:
        self.requests: dict[str, RequestRecord] = {}
        self._block_size = block_size
        self._tap = tap
        self._blocks: dict[int, _Block] = {}

    def was_given_away(self, fact: HitFact) -> bool:
        """Whether the block of a hit has begun another tenancy since."""
        return self._blocks[fact.block_id].tenancy != fact.tenancy

    def step_started(self, schedule: SimSchedule) -> None:
        """Take in tables and tenancies."""
        runs = {run.req_id: run for run in schedule.runs}
        started = [event for event in schedule.events.requests if event.kind is RequestEventKind.STARTED]
        sources = {copy.source_block_id: self._block(copy.source_block_id) for copy in schedule.events.block_copies}
        for event in started:
            track = runs[event.req_id].track
            request = RequestRecord(
                track, PrefixDigester(track.request.salt.encode()), list(event.block_ids), event.num_computed_tokens
            )
            self.requests[event.req_id] = request
            first_new = -(-event.num_computed_tokens // self._block_size)
            self._new_tenancies(event.block_ids[first_new:])
        for event in schedule.events.requests:
            if event.kind is RequestEventKind.EXTENDED:
                self.requests[event.req_id].block_ids.extend(event.block_ids)
                self._new_tenancies(event.block_ids)
        for copy in schedule.events.block_copies:
            valid = self._valid_offsets_of_copy(copy.destination_block_id, started)
            self._new_tenancies([copy.destination_block_id])
            self._blocks[copy.destination_block_id].stored = {
                offset: {key: _StoredRow(row.step, copied=True) for key, row in rows.items()}
                for offset, rows in sources[copy.source_block_id].stored.items()
                if offset < valid
            }

    def forward_ran(self, forward: Forward) -> None:
        """Let the tap keep every row the forward computed."""
        outputs = {HIDDEN_KEY: forward.outputs.hidden, **forward.outputs.token_outputs}
        row = 0
        for run in forward.runs:
            positions = range(run.start, run.stop)
            digests = self.requests[run.req_id].digests(positions)
            for key, rows in outputs.items():
                self._tap.record(key, digests, positions, rows[row : row + run.num_tokens])
            row += run.num_tokens

    def step_saved(self, step: SavedStep) -> None:
        """Take in which rows are stored now, and what the step promises."""
        written = step.emitted | {HIDDEN_KEY}
        for run in step.runs:
            for position in range(run.start, run.stop):
                block = self._blocks[run.block_ids[position // self._block_size]]
                rows = block.stored.setdefault(position % self._block_size, {})
                rows.update((key, _StoredRow(step.number)) for key in written)
        for run in step.runs:
            request = self.requests[run.req_id]
            if run.first:
                self._take_hit(request, step.number)
            request.keys_at.extend([written] * run.num_tokens)
            if run.is_chunk:
                request.chunked.update(range(run.start, run.stop))
            request.promised_upto = run.stop

    def _take_hit(self, request: RequestRecord, step_number: int) -> None:
        recycled = False
        for position in range(request.hit):
            block_id = request.block_ids[position // self._block_size]
            block = self._block(block_id)
            rows = block.stored.get(position % self._block_size, {})
            hidden = rows.get(HIDDEN_KEY)
            if position % self._block_size == 0:
                recycled = block.previous_keys is not None and block.previous_keys != block.keys()
            request.keys_at.append(frozenset(rows))
            request.absent += hidden is None
            request.hit_facts.append(
                HitFact(
                    same_step=hidden is not None and hidden.step == step_number,
                    recycled=recycled,
                    copied=hidden is not None and hidden.copied,
                    block_id=block_id,
                    tenancy=block.tenancy,
                )
            )

    def _valid_offsets_of_copy(self, destination: int, started: Sequence[RequestEvent]) -> int:
        for event in started:
            index = event.num_computed_tokens // self._block_size
            if index < len(event.block_ids) and event.block_ids[index] == destination:
                return int(event.num_computed_tokens % self._block_size)
        return self._block_size

    def _block(self, block_id: int) -> _Block:
        return self._blocks.setdefault(block_id, _Block())

    def _new_tenancies(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            old = self._block(block_id)
            previous = old.keys() if old.stored else old.previous_keys
            self._blocks[block_id] = _Block(old.tenancy + 1, previous_keys=previous)
