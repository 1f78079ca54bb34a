# SPDX-License-Identifier: Apache-2.0
"""Writes down, from the engine's own words alone, which rows exist in which slot and what is promised to whom.

Dictionaries and sets of positions: no threads, no copies, no arithmetic shared with the cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from omni_core.prefix_cache.config import HIDDEN_KEY
from omni_core.prefix_cache.events import BlockCopy, RequestEvent, RequestEventKind, StepEvents
from omni_core.testing.engine_schedule import ScheduledRun, SimSchedule
from omni_core.testing.ledger_blocks import LedgerBlocks
from omni_core.testing.ledger_records import (
    ContentRecord,
    HitFact,
    LedgerBlock,
    Standing,
    StepDue,
    StoredRow,
    content_bytes,
    digester_of,
)
from omni_core.testing.sim_step import Forward, SavedStep
from omni_core.testing.tap import PrefixDigest, RowTap

_ENDS = (RequestEventKind.FINISHED, RequestEventKind.ABORTED)


class EngineLedger:
    """Follows one engine, as a `StepObserver`. Engine thread only.

    Args:
        block_size: tokens per block.
        tap: is given every row a forward computed.
        digests_told: whether events tell block digests, so that the cache can know what lies under a hash.
    """

    def __init__(self, block_size: int, tap: RowTap, *, digests_told: bool) -> None:
        self.contents: list[ContentRecord] = []
        """Every content version of every life, in the order they began."""
        self._live: dict[str, ContentRecord] = {}
        self._num_lives = 0
        self._dues: dict[tuple[int, str], StepDue] = {}
        self._block_size = block_size
        self._tap = tap
        self._digests_told = digests_told
        self._blocks = LedgerBlocks(block_size)

    def due(self, step: SavedStep, req_id: str) -> StepDue:
        """What a saved step owes to one of its requests."""
        return self._dues[step.step_id, req_id]

    def was_given_away(self, fact: HitFact) -> bool:
        """Whether the block of a hit has begun another tenancy since."""
        return self._blocks.block(fact.block_id).tenancy != fact.tenancy

    # -- the observer -------------------------------------------------------------------------------------------------

    def step_started(self, schedule: SimSchedule) -> None:
        """Take in ends, contents, tables and tenancies."""
        events = schedule.events
        for event in events.requests:
            content = self._live.get(event.req_id)
            if event.kind in _ENDS and content is not None:
                self._leave_drafts_unsettled(content, ())
                content.standing = Standing.ENDED
                del self._live[event.req_id]
        entering = [event for event in events.requests if event.kind not in (*_ENDS, RequestEventKind.EXTENDED)]
        # Copies see what their source held before any tenancy of this step began.
        sources = [self._blocks.block(copy.source_block_id) for copy in events.block_copies]
        runs = {run.req_id: run for run in schedule.runs}
        for event in entering:
            self._enter(event, runs[event.req_id], schedule.number)
            self._blocks.new_tenancies(event.block_ids[self._blocks.num_for(event.num_computed_tokens) :])
        for event in events.requests:
            if event.kind is RequestEventKind.EXTENDED:
                self._blocks.new_tenancies(event.block_ids)
        for copy, source in zip(events.block_copies, sources, strict=True):
            self._copy(copy, source, entering)
        for event in entering:
            self._mark_private(event)
        if self._digests_told:
            self._take_digests(events)
        for copy, source in zip(events.block_copies, sources, strict=True):
            self._blocks.block(copy.destination_block_id).copied_from_private = (
                source.private_to is not None or source.copied_from_private
            )
        for event in entering:
            self._mark_doubtful(event)

    def forward_ran(self, forward: Forward) -> None:
        """Let the tap keep every row the forward computed."""
        outputs = {HIDDEN_KEY: forward.outputs.hidden, **forward.outputs.token_outputs}
        row = 0
        for run in forward.runs:
            positions = range(run.start, run.stop)
            digests = self._run_digests(run)
            for key, rows in outputs.items():
                self._tap.record(key, digests, positions, rows[row : row + run.num_tokens])
            row += run.num_tokens

    def step_saved(self, step: SavedStep) -> None:
        """Take in which rows are stored now, and what the step owes."""
        written = step.emitted | {HIDDEN_KEY}
        for run in step.runs:
            for position, digest in zip(range(run.start, run.stop), self._run_digests(run), strict=True):
                rows = self._blocks.rows_at(run, position)
                adapter_id = run.track.request.adapter_id
                rows.update((key, StoredRow(digest, step.number, adapter_id=adapter_id)) for key in written)
                self._blocks.block_at(run, position).old_offsets.discard(position % self._block_size)
        for run in step.runs:
            self._dues[step.step_id, run.req_id] = self._owe(step, run, frozenset(written))
            content = self._live_content(run)
            content.drafted = list(range(run.known_stop, run.stop))
            content.block_ids = run.block_ids

    def weights_changed(self, adapter_id: int | None) -> None:
        """Forget every row of the old weights; who holds which block stays."""
        self._blocks.weights_changed(adapter_id)

    # -- what a step owes ---------------------------------------------------------------------------------------------

    def _owe(self, step: SavedStep, run: ScheduledRun, written: frozenset[str]) -> StepDue:
        content = self._live_content(run)
        valid_stop = step.valid_stop(run)
        had_rows = bool(content.promised)
        # Everything before the end of a run is computed by it, was promised by an earlier step, or is in its hit.
        due = [position for position in range(valid_stop) if position not in content.promised]
        owed = content.undelivered()
        from_store = [p for p in range(min(run.start, valid_stop)) if p in owed or p not in content.promised]
        keys_at = dict.fromkeys(range(run.start, valid_stop), written)
        keys_at.update(self._stored_keys(content, run, from_store))
        read = [position for position in due if position < run.start]
        absent = [position for position in read if HIDDEN_KEY not in keys_at[position]]
        owed_absent = any(HIDDEN_KEY not in keys_at[p] for p in from_store if p in content.promised)
        step_due = StepDue(
            content,
            step.number,
            run,
            valid_stop,
            due,
            resumed=had_rows and bool(read),
            keys_at=keys_at,
            facts=self._hit_facts(run, read, step.number),
            absent=absent,
            absent_other_content=sum(HIDDEN_KEY in self._blocks.rows_at(run, position) for position in absent),
            absent_old_weights=sum(
                position % self._block_size in self._blocks.block_at(run, position).old_offsets for position in absent
            ),
            owed_absent=owed_absent,
        )
        if absent and content.failed_in is None:
            content.failed_in = step.number
        doubtful = owed_absent or any(self._may_withhold(content, run, position) for position in from_store)
        if doubtful and content.doubtful_from is None:
            content.doubtful_from = step.number
        self._note_chunks(content, run, entered=bool(read) or not had_rows)
        content.promised.update(due)
        return step_due

    def _stored_keys(
        self, content: ContentRecord, run: ScheduledRun, positions: Sequence[int]
    ) -> dict[int, frozenset[str]]:
        digests = content.digests(positions)
        return {
            position: frozenset(key for key, row in self._blocks.rows_at(run, position).items() if row.digest == digest)
            for position, digest in zip(positions, digests, strict=True)
        }

    def _hit_facts(self, run: ScheduledRun, positions: Iterable[int], number: int) -> dict[int, HitFact]:
        facts = {}
        for position in positions:
            block_id = run.block_ids[position // self._block_size]
            block = self._blocks.block(block_id)
            hidden = self._blocks.rows_at(run, position).get(HIDDEN_KEY)
            facts[position] = HitFact(
                same_step=hidden is not None and hidden.step == number,
                recycled=block.previous_keys is not None and block.previous_keys != block.keys(),
                copied=hidden is not None and hidden.copied,
                block_id=block_id,
                tenancy=block.tenancy,
            )
        return facts

    def _may_withhold(self, content: ContentRecord, run: ScheduledRun, position: int) -> bool:
        """Whether the cache cannot know that this row is right.

        It is not told so where another request, replaced since, kept the block; where the block was hashed in a
        schedule that was taken back; and where drafts were never counted.
        """
        block = self._blocks.block(run.block_ids[position // self._block_size])
        hidden = self._blocks.rows_at(run, position).get(HIDDEN_KEY)
        return content.life in block.doubtful_for or (hidden is not None and hidden.unsettled)

    def _note_chunks(self, content: ContentRecord, run: ScheduledRun, *, entered: bool) -> None:
        prompt = run.track.request.num_prompt_tokens
        if run.stop < prompt or (run.start < prompt and not entered):
            content.chunked.update(range(run.start, run.stop))

    # -- contents and blocks ------------------------------------------------------------------------------------------

    def _enter(self, event: RequestEvent, run: ScheduledRun, number: int) -> None:
        content = self._live.get(event.req_id)
        if content is not None and event.kind is not RequestEventKind.REPLACED:
            content.hit = max(content.hit, event.num_computed_tokens)
            content.drafted = []
            return
        life, version = self._num_lives, 0
        if content is None:
            self._num_lives += 1
        else:
            self._leave_drafts_unsettled(content, event.block_ids[: event.num_computed_tokens // self._block_size])
            content.standing, content.replaced_in = Standing.REPLACED, number
            life, version = content.life, content.version + 1
        content = ContentRecord(run.track, life, version, event.num_computed_tokens, digester_of(run.track))
        self._live[event.req_id] = content
        self.contents.append(content)

    def _mark_private(self, event: RequestEvent) -> None:
        """Of a block that a replaced request keeps in part, the rest is of the old content, and the hash may be too."""
        full, kept = divmod(event.num_computed_tokens, self._block_size)
        if event.kind is RequestEventKind.REPLACED and kept:
            block = self._blocks.block(event.block_ids[full])
            block.private_to = self._live[event.req_id]
            block.stored = {offset: rows for offset, rows in block.stored.items() if offset < kept}

    def _leave_drafts_unsettled(self, content: ContentRecord, kept: Sequence[int]) -> None:
        """Nobody will say which drafts of a content's last run were accepted, but for those in blocks that are kept."""
        for position in content.drafted:
            block_id = content.block_ids[position // self._block_size]
            if block_id not in kept:
                rows = self._blocks.block(block_id).stored.get(position % self._block_size, {})
                rows.update({key: replace(row, unsettled=True) for key, row in rows.items()})
        content.drafted = []

    def _take_digests(self, events: StepEvents) -> None:
        """Which tenancies the cache has a digest of."""
        for filled in events.filled_blocks:
            self._blocks.block(filled.block_id).has_digest = True
        for event in events.requests:
            known = 0 if event.kind is RequestEventKind.EXTENDED else event.num_computed_tokens // self._block_size
            for block_id, digest in zip(event.block_ids[known:], event.block_digests[known:], strict=True):
                self._blocks.block(block_id).has_digest |= digest != 0

    def _mark_doubtful(self, event: RequestEvent) -> None:
        """Of which blocks of a hit the cache cannot know that their rows are the request's, or knows the contrary."""
        content, size = self._live[event.req_id], self._block_size
        for index, block_id in enumerate(event.block_ids[: self._blocks.num_for(event.num_computed_tokens)]):
            block = self._blocks.block(block_id)
            span = range(index * size, min((index + 1) * size, event.num_computed_tokens))
            others = any(
                HIDDEN_KEY in (rows := block.stored.get(position % size, {})) and rows[HIDDEN_KEY].digest != digest
                for position, digest in zip(span, content.digests(span), strict=True)
            )
            owner = block.private_to
            foreign = owner is not None and owner.life != content.life
            unknown = not block.has_digest if self._digests_told else foreign
            if others or unknown or block.copied_from_private:
                block.doubtful_for.add(content.life)

    def _copy(self, copy: BlockCopy, source: LedgerBlock, entering: Sequence[RequestEvent]) -> None:
        valid = self._block_size
        for event in entering:
            index = event.num_computed_tokens // self._block_size
            if event.block_ids[index : index + 1] == (copy.destination_block_id,):
                valid = event.num_computed_tokens % self._block_size
        self._blocks.copy(copy.destination_block_id, source, valid)

    def _live_content(self, run: ScheduledRun) -> ContentRecord:
        content = self._live[run.req_id]
        if content.track is not run.track:
            raise ValueError(f"request {run.req_id!r} runs content that no event announced")
        return content

    def _run_digests(self, run: ScheduledRun) -> list[PrefixDigest]:
        """Of every position of the run as the forward saw it, drafts included."""
        content = self._live_content(run)
        if not run.drafts:
            return content.digests(range(run.start, run.stop))
        track = run.forward_track()
        digester = digester_of(track)
        digester.extend(content_bytes(track, 0, run.stop))
        return [digester[position] for position in range(run.start, run.stop)]
