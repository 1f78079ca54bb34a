# SPDX-License-Identifier: Apache-2.0
"""What the prefix cache must answer, kept in a few dictionaries: no threads, no copies, no numpy.

A row is a number, the same for every key of its token. The model is told the very events and runs the cache is told,
and says what each call returns. It shares no code with the cache.
"""

from dictionary_records import Block, Expected, Life, Place, Read, SavedRun, SavedStep

from omni_core.prefix_cache.config import HIDDEN_KEY
from omni_core.prefix_cache.errors import (
    ContentReplacedError,
    HitRowsAbsentError,
    LifecycleError,
    PositionGapError,
    RequestEventError,
    RequestNotStartedError,
)
from omni_core.prefix_cache.events import RequestEventKind as Kind


class DictionaryModel:
    """`stores_hidden=False`: a policy without full hidden states."""

    def __init__(self, block_size, num_blocks, *, stores_hidden=True):
        self.block_size = block_size
        self.stores_hidden = stores_hidden
        self.blocks = {block_id: Block() for block_id in range(num_blocks)}
        self.keys = []
        self.live = {}
        self.owners = {}
        """Request id → token of its life; the same for every version of its content."""
        self.steps = {}
        self.under_way = None
        self.new_weights = []
        self.partial = {}
        self.counts = dict.fromkeys(("saved", "materialized", "discarded", "rows", "from_hits", "failed"), 0)

    # -- a step starts

    def step_starts(self, events):
        self.end_unsaved_step()
        for event in events.requests:
            if event.kind in (Kind.FINISHED, Kind.ABORTED):
                self._expire_drafts(event.req_id)
                self._end(event.req_id)
        for event in events.requests:
            if event.kind in (Kind.STARTED, Kind.RESUMED, Kind.REPLACED) and (
                event.block_ids or event.kind is not Kind.RESUMED
            ):
                self._expire_drafts(event.req_id, event)
        partly_hit = {}
        for event in events.requests:
            whole, rest = divmod(event.num_computed_tokens, self.block_size)
            if rest and whole < len(event.block_ids):
                partly_hit[event.block_ids[whole]] = rest
        for copy in events.block_copies:
            stop = partly_hit.get(copy.destination_block_id, self.block_size)
            source = self.blocks[copy.source_block_id]
            readable = source.rows if source.private_to is None else {}
            copied = {offset: dict(rows) for offset, rows in readable.items() if offset < stop}
            self.blocks[copy.destination_block_id] = Block(rows=copied, adapter=source.adapter)
        copied_onto = {copy.destination_block_id for copy in events.block_copies}
        digests = {filled.block_id: filled.digest for filled in events.filled_blocks}
        for event in events.requests:
            kept = 0 if event.kind is Kind.EXTENDED else self._blocks_of(event.num_computed_tokens)
            for block_id in event.block_ids[kept:]:
                if block_id not in copied_onto:
                    self.blocks[block_id] = Block()
            # The block a hit ends inside is the request's own to fill, and to name.
            own = 0 if event.kind is Kind.EXTENDED else event.num_computed_tokens // self.block_size
            digests.update(zip(event.block_ids[own:], event.block_digests[own:], strict=False))
        for block_id, digest in digests.items():
            self.blocks[block_id].digest = digest
        for event in events.requests:
            if event.kind is Kind.REPLACED and event.num_computed_tokens % self.block_size:
                kept = event.num_computed_tokens // self.block_size
                digest = event.block_digests[kept] if event.block_digests else 0
                block = self.blocks[event.block_ids[kept]]
                block.digest, block.private_to = digest, self.owners.setdefault(event.req_id, object())
        for event in events.requests:
            if event.kind in (Kind.STARTED, Kind.RESUMED, Kind.REPLACED) and event.block_ids:
                self._fill(event)
        self.under_way = []
        for event in events.requests:
            if event.kind is Kind.EXTENDED and event.req_id in self.live:
                self.live[event.req_id].table += self._places(event.block_ids)
                for block_id in event.block_ids:
                    self.blocks[block_id].adapter = self.live[event.req_id].adapter
        for event in events.requests:
            if event.kind in (Kind.STARTED, Kind.RESUMED, Kind.REPLACED):
                self._enter(event)

    def end_unsaved_step(self):
        for read in self.under_way or ():
            self._owe(read.life, read.places)
        self._step_is_over()

    def _step_is_over(self):
        self.under_way = None
        for adapter in self.new_weights:
            self._forget_old(adapter)
        self.new_weights = []

    def bump(self, adapter):
        """Rows that become absent, by key; those of a step under way go with it. `adapter=None`: the weights."""
        if self.under_way is None:
            return self._forget_old(adapter)
        if adapter in self.new_weights or None in self.new_weights:
            return dict.fromkeys(self.keys, 0)
        self.new_weights.append(adapter)
        return self._count(adapter)

    def _count(self, adapter):
        blocks = [block for block in self.blocks.values() if adapter in (None, block.adapter)]
        return {key: sum(key in rows for block in blocks for rows in block.rows.values()) for key in self.keys}

    def _forget_old(self, adapter):
        counted = self._count(adapter)
        for block in self.blocks.values():
            if adapter in (None, block.adapter):
                block.rows.clear()
        return counted

    def _fill(self, event):
        """The blocks behind a hit are the request's own; so is the one that the hit ends inside."""
        adapter = self._adapter_of(event)
        for block_id in event.block_ids[self._blocks_of(event.num_computed_tokens) :]:
            self.blocks[block_id].adapter = adapter
        whole, rest = divmod(event.num_computed_tokens, self.block_size)
        if rest and self.blocks[event.block_ids[whole]].adapter != adapter:
            self.blocks[event.block_ids[whole]] = Block(adapter=adapter)

    def _adapter_of(self, event):
        return self.live[event.req_id].adapter if event.req_id in self.live else event.adapter_id

    def _enter(self, event):
        req_id, hit = event.req_id, event.num_computed_tokens
        if event.kind is Kind.RESUMED and not event.block_ids:
            self._refuse(req_id, RequestEventError)
            return
        life = self.live.get(req_id)
        adapter = self._adapter_of(event)
        known = [] if life is None else [place.tenancy for place in life.table if place.withheld]
        if event.kind is Kind.REPLACED and life is not None:
            life.replaced = True
            life.live = False
            del self.live[req_id]
            for step in self.steps.values():
                if req_id in step.runs and step.runs[req_id].life is life:
                    step.failed[req_id] = ContentReplacedError
            life = None
        if life is None and event.kind is Kind.RESUMED:
            self._refuse(req_id, RequestNotStartedError)
            return
        owner = self.owners.setdefault(req_id, object())
        expected = event.block_digests or (0,) * len(event.block_ids)
        table = self._places(event.block_ids)
        for place, digest in zip(table[: self._blocks_of(hit)], expected, strict=False):
            block = place.tenancy
            if block.private_to not in (None, owner):
                place.withheld = digest == 0 or digest != block.digest
            else:
                place.withheld = digest not in (0, block.digest)
            # Rows it was kept from once stay others', whatever digest the block is told to get when it is filled.
            place.withheld = place.withheld or any(block is each for each in known) or block.adapter != adapter
        written = self._blocks_of(hit) * self.block_size
        if life is None:
            life = self.live[req_id] = Life(req_id, table, hit, hit, hit, written, adapter)
            wanted = range(hit)
        else:
            if life.draft_floor < life.next and not event.num_known_tokens:
                self._refuse(req_id, LifecycleError)
                return
            if life.draft_floor < life.next:
                life.promised = min(life.promised, max(event.num_known_tokens - 1, life.draft_floor))
            life.backs_off = False
            wanted = range(life.promised, hit)
            if wanted:
                wanted = sorted({p for p in life.missing if p < life.promised} | set(wanted))
                life.missing -= set(wanted)
            life.table, life.next, life.draft_floor, life.written = table, hit, hit, written
            life.promised = max(life.promised, hit)
        if len(wanted) and life.error is None:
            self.under_way.append(self._read(life, wanted))

    # -- a step is saved

    def save(self, step_id, runs, keys, *, carry_owed=True):
        """`keys`: what the step brings, `HIDDEN_KEY` included."""
        stored = [key for key in keys if key != HIDDEN_KEY or self.stores_hidden]
        self.keys += [key for key in stored if key not in self.keys]
        for run in runs:
            if run.req_id in self.live:
                life = self.live[run.req_id]
                for position, slot in enumerate(run.slots, run.first):
                    if slot is not None and position < life.written:
                        self.blocks[slot[0]].rows.pop(slot[1], None)
                if run.first < life.written:
                    self._expire(life, range(run.last, life.written))
        for run in runs:
            for position, slot in enumerate(run.slots, run.first):
                if slot is not None:
                    rows = self.blocks[slot[0]].rows.setdefault(slot[1], {})
                    rows.update(dict.fromkeys(stored, run.rows[position - run.first]))
        written = {slot for run in runs for slot in run.slots}
        step = SavedStep(tuple(keys), tuple(self.keys), {}, {})
        reads = {read.life.req_id: read for read in self.under_way}
        self.under_way = None
        for read in reads.values():
            self._look_up(read, [p for p, place in read.places.items() if place is not None and place in written])
            if read.life.req_id not in {run.req_id for run in runs}:
                self._owe(read.life, read.places)
        for run in runs:
            life = self.live.get(run.req_id)
            self._judge(run, life, step)
            again = 0 if life is None else min(max(life.promised - run.first, 0), len(run.rows))
            saved = step.runs[run.req_id] = SavedRun(run, life, again, reads.get(run.req_id))
            if run.req_id in step.failed or saved.read is not None or life.backs_off or not carry_owed:
                continue
            carried = sorted(p for p in life.missing if p < run.last)
            if carried:
                life.missing -= set(carried)
                saved.read = reads[run.req_id] = self._read(life, carried)
                saved.read.owed = True
        for read in reads.values():
            if (
                self.stores_hidden
                and read.life.req_id in step.runs
                and any(HIDDEN_KEY not in rows for rows in read.rows.values())
            ):
                self._refuse(read.life.req_id, HitRowsAbsentError)
                step.failed[read.life.req_id] = HitRowsAbsentError
        for saved in step.runs.values():
            if saved.life is not None:
                saved.life.next = saved.run.last
                saved.life.promised = max(saved.life.promised, saved.run.last)
                saved.life.draft_floor = saved.run.last - saved.run.drafts
                saved.life.written = saved.run.last
        self.steps[step_id] = step
        self.counts["saved"] += 1
        self._step_is_over()

    def _judge(self, run, life, step):
        if life is None:
            step.failed[run.req_id] = RequestNotStartedError
            return
        if life.draft_floor <= run.first < life.next:
            life.next = run.first
            life.promised = min(life.promised, run.first)
        if life.error is None and run.first != life.next:
            self._refuse(run.req_id, PositionGapError if run.first > life.next else LifecycleError)
        if life.error is not None:
            step.failed[run.req_id] = life.error

    # -- a step is consumed

    def materialize(self, step_id, asked, sampled_counts, *, two_phase=False):
        """(request → what is delivered, request → error class)."""
        step = self._consume(step_id, "materialized")
        failed = {req_id: step.failed[req_id] for req_id in asked if req_id in step.failed}
        served = {
            req_id: self._delivery(step, step.runs[req_id], sampled_counts)
            for req_id in step.runs
            if req_id in asked and req_id not in failed
        }
        if not two_phase:
            for delivery in served.values():
                self.acknowledge(delivery)
        for req_id in step.runs:
            if req_id not in served:
                self._owe_run(step, req_id, sampled_counts)
        return served, failed

    def discard(self, step_id, sampled_counts):
        step = self._consume(step_id, "discarded")
        for req_id in step.runs:
            self._owe_run(step, req_id, sampled_counts)

    def acknowledge(self, delivery):
        self.counts["rows"] += len(delivery.positions)
        self.counts["from_hits"] += delivery.num_from_hits
        life = self.live.get(delivery.life.req_id)
        if life is not None:
            life.backs_off = False

    def give_up(self, delivery):
        """Two-phase: released without an acknowledgement."""
        self._owe(delivery.life, delivery.positions)
        if delivery.carried_owed and delivery.life.live:
            delivery.life.backs_off = True

    def _consume(self, step_id, how):
        self.counts[how] += 1
        return self.steps.pop(step_id)

    def _valid_rows(self, saved, sampled_counts):
        """Positions of the run whose rows the step delivers, with the rows."""
        run = saved.run
        rejected = 1 + run.drafts - sampled_counts[run.req_id] if run.drafts else 0
        return {run.first + i: run.rows[i] for i in range(saved.again, len(run.rows) - rejected)}

    def _owe_run(self, step, req_id, sampled_counts):
        saved = step.runs[req_id]
        if req_id in step.failed:
            return
        if saved.read is not None:
            self._owe(saved.life, saved.read.places)
            if saved.read.owed and saved.life.live:
                saved.life.backs_off = True
        self._owe(saved.life, self._valid_rows(saved, sampled_counts))

    def _delivery(self, step, saved, sampled_counts):
        own = self._valid_rows(saved, sampled_counts)
        read = saved.read
        if read is None:
            return Expected(list(own), dict.fromkeys(step.keys, own), 0, saved.life, carried_owed=False)
        keys = {}
        for key in step.known_keys:
            if key in step.keys or any(key in rows for rows in read.rows.values()):
                keys[key] = {p: rows.get(key, 0) for p, rows in read.rows.items()}
                keys[key] |= own if key in step.keys else dict.fromkeys(own, 0)
        positions = [*read.rows, *own] if keys else list(own)
        keys |= {key: own for key in step.keys if key not in step.known_keys}
        return Expected(positions, keys, len(positions) - len(own), saved.life, read.owed)

    # -- the rest

    def reset(self):
        """(rows present by key, requests forgotten, steps dropped)."""
        report = (
            {key: sum(key in r for block in self.blocks.values() for r in block.rows.values()) for key in self.keys},
            len(self.live),
            len(self.steps),
        )
        self.end_unsaved_step()
        for step in self.steps.values():
            for req_id in step.runs:
                self._owe_run(step, req_id, {req_id: 1})
        self.steps.clear()
        for req_id in list(self.live):
            self._end(req_id)
        self.blocks = {block_id: Block() for block_id in self.blocks}
        return report

    def take_partial(self):
        """(request, missing positions) of ended lives."""
        taken, self.partial = self.partial, {}
        return sorted((life.req_id, sorted(missing)) for life, missing in taken.items())

    # -- helpers

    def _blocks_of(self, num_tokens):
        return -(-num_tokens // self.block_size)

    def _places(self, block_ids):
        return [Place(block_id, self.blocks[block_id]) for block_id in block_ids]

    def _read(self, life, positions):
        places = {}
        for position in positions:
            index = position // self.block_size
            place = life.table[index] if index < len(life.table) else None
            held = place is not None and self.blocks[place.block_id] is place.tenancy and not place.withheld
            places[position] = (place.block_id, position % self.block_size) if held else None
        read = Read(life, places)
        self._look_up(read, places)
        return read

    def _look_up(self, read, positions):
        for position in positions:
            place = read.places[position]
            read.rows[position] = {} if place is None else dict(self.blocks[place[0]].rows.get(place[1], {}))

    def _expire(self, life, positions):
        """What lies at these positions is of content that is gone; rows of later tenancies are not touched."""
        for position in positions:
            index, offset = divmod(position, self.block_size)
            place = life.table[index] if index < len(life.table) else None
            if place is not None and not place.withheld and self.blocks[place.block_id] is place.tenancy:
                place.tenancy.rows.pop(offset, None)

    def _expire_drafts(self, req_id, event=None):
        """A request ends or enters right after a run with drafts: rows of rejected ones may lie in its blocks."""
        life = self.live.get(req_id)
        if life is None or life.draft_floor >= life.next:
            return
        positions = range(life.draft_floor, life.next)
        if event is not None and event.kind is Kind.REPLACED:
            kept = [
                position
                for position in positions
                if position < event.num_computed_tokens
                and life.table[position // self.block_size].block_id == event.block_ids[position // self.block_size]
            ]
            positions = [position for position in positions if position not in kept]
        elif event is not None:
            positions = [position for position in positions if position >= event.num_known_tokens - 1]
        self._expire(life, positions)

    def _refuse(self, req_id, error):
        life = self.live.setdefault(req_id, Life(req_id, [], 0, 0, 0, 0))
        self.owners.setdefault(req_id, object())
        if life.error is None:
            life.error = error
            life.missing.clear()
            self.counts["failed"] += 1

    def _owe(self, life, positions):
        if life is None or life.replaced or not positions:
            return
        if not life.live:
            self.partial.setdefault(life, set()).update(positions)
        elif life.error is None:
            life.missing |= set(positions)

    def _end(self, req_id):
        life = self.live.pop(req_id, None)
        if life is None:
            return
        life.live = False
        del self.owners[req_id]
        if life.missing:
            self.partial[life] = set(life.missing)
