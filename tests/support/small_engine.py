# SPDX-License-Identifier: Apache-2.0
"""An engine small enough to shrink: it keeps block tables, and turns picked numbers into events and runs.

Every choice is a number taken modulo what there is to choose from, so any list of numbers is a run of an engine. It
never asks what the cache holds: a hit may point at blocks whose rows were never computed.
"""

from collections import deque
from dataclasses import dataclass, field

from dictionary_records import Run

from omni_core.prefix_cache.events import BlockCopy, FilledBlock, RequestEvent, StepEvents
from omni_core.prefix_cache.events import RequestEventKind as Kind

MOST_LIVE = 3
REQ_IDS = ("a", "b", "c", "d")
"""Few, so that ids are used again soon."""
STRANGER = "stranger"
ADAPTERS = (7, 8)


def pick(choices, number):
    """One of the choices, or `None` if there is none."""
    choices = list(choices)
    return choices[number % len(choices)] if choices else None


@dataclass
class Request:
    """A request as the engine sees it."""

    req_id: str
    table: list
    computed: int
    known: int
    """Tokens known: prompt and accepted outputs."""
    on_hold: bool = False
    """Preempted: its blocks are free for others, it runs again only once it is resumed."""
    drafted: bool = False
    """Its last run had drafts."""


@dataclass
class Planned:
    """A run of the step to come."""

    request: Request
    first: int
    last: int
    drafts: int
    slots: list


@dataclass
class Plan:
    """A step to come."""

    events: list = field(default_factory=list)
    copies: list = field(default_factory=list)
    filled: list = field(default_factory=list)
    runs: dict = field(default_factory=dict)

    def told(self):
        return StepEvents(tuple(self.events), tuple(self.copies), tuple(self.filled))

    @property
    def written(self):
        return {slot for run in self.runs.values() for slot in run.slots if slot is not None}


class SmallEngine:
    """Knows `num_blocks` blocks; block 0 is never used."""

    def __init__(self, block_size, num_blocks):
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.live = {}
        self.donors = deque(maxlen=6)
        """(table, tokens) of requests seen, to take hits from."""
        self.plan = Plan()
        self._next_row = 1

    # -- what a step may hold; each returns at once if it cannot be done

    def start(self, which, donor, hit, prompt, chunk, way):
        req_id = pick([r for r in REQ_IDS if r not in self.live], which)
        if req_id is not None and sum(not r.on_hold for r in self.live.values()) < MOST_LIVE:
            self._enter(Kind.STARTED, req_id, donor, min(hit, prompt - 1), prompt, chunk, way)

    def go_on(self, which, chunk, drafts, way):
        request = pick([r for r in self._idle() if r.computed < r.known], which)
        if request is None:
            self.start(which, way, chunk, chunk + 2, chunk, way)
        else:
            if not self._extend(request, min(request.computed + chunk, request.known) + drafts):
                return
            stop = min(request.computed + chunk, request.known)
            self._run(request, request.computed, stop, drafts if stop == request.known else 0, way)

    def come_back(self, which, donor, hit, chunk, way):
        """After a preemption, announced or not: in the V1 or the V2 form."""
        request = pick(self._idle(on_hold=None), which)
        if request is not None:
            kind = Kind.STARTED if way % 2 else Kind.RESUMED
            if way >= 8:  # what it would compute next, another one has computed
                tables = self._donor_tables()
                donor = max(range(len(tables)), key=lambda index: tables[index][1], default=0)
            self._enter(kind, request.req_id, donor, min(hit, request.known - 1), request.known, chunk, way // 2)

    def next_chunk(self, which, more, chunk, way):
        """The next chunk of a streamed prompt: the request enters as new with its own tokens computed."""
        request = pick(self._idle(), which)
        if request is not None:
            known = request.known + more
            self._enter(Kind.STARTED, request.req_id, None, request.computed, known, chunk, way, own=request)

    def replace(self, which, hit, prompt, chunk, way):
        request = pick(self._idle(), which)
        if request is not None:
            hit = min(hit, request.computed, prompt - 1)
            self._enter(Kind.REPLACED, request.req_id, None, hit, prompt, chunk, way, own=request)

    def end(self, which, way):
        request = pick(self._idle(on_hold=None), which)
        if way % 8 == 7:
            self.plan.events.append(RequestEvent(Kind.ABORTED, STRANGER))
        elif request is not None:
            self.plan.events.append(RequestEvent(Kind.ABORTED if way % 2 else Kind.FINISHED, request.req_id))
            self._forget(request.req_id)

    def preempt(self, which):
        """Nobody is told."""
        request = pick(self._idle(), which)
        if request is not None:
            request.on_hold = True

    def copy(self, source, destination):
        """A block copy that no hit asks for, onto a block nobody has."""
        block_id = pick(self._free(), destination)
        if block_id is not None and block_id != 1 + source % (self.num_blocks - 1):
            self.plan.copies.append(BlockCopy(1 + source % (self.num_blocks - 1), block_id))

    def fill(self, which, digest):
        block_id = pick([block_id for request in self.live.values() for block_id in request.table], which)
        if block_id is not None:
            self.plan.filled.append(FilledBlock(block_id, digest))

    def misbehave(self, which, way):
        """Something no engine should do; it must cost one request."""
        if way % 4 == 0 and STRANGER not in {event.req_id for event in self.plan.events}:
            block_ids = tuple(self._free()[: which % 2])
            self.plan.events.append(RequestEvent(Kind.RESUMED, STRANGER, block_ids))
        request = pick(self._idle(), which)
        if way % 4 == 1:
            block_id = pick(self._free(), which)
            if block_id is not None and STRANGER not in self.plan.runs:
                self._run(Request(STRANGER, [block_id], 0, 1), 0, 1, 0, 0)
        elif request is not None and way % 4 == 2:
            self.plan.events.append(RequestEvent(Kind.RESUMED, request.req_id))
            self._run(request, request.computed, request.computed + 1, 0, 0)
        elif request is not None and not request.drafted and request.computed:
            first = request.computed + 1 if which % 2 else request.computed - 1
            self._run(request, first, first + 1, 0, 0)

    # -- a step

    def begin(self):
        """What the cache is told; the plan stays, to be computed or lost."""
        told = self.plan.told()
        self.plan.events, self.plan.copies, self.plan.filled = [], [], []
        return told

    def lose(self):
        """The forward never runs."""
        self.plan = Plan()

    def forward(self, left_out, accepted):
        """(runs in schedule order, sampled counts of those with drafts). No two rows get the same number.

        `left_out`: a request that is aborted before the forward. `accepted`: how many drafts are, at most.
        """
        runs, counts = [], {}
        aborted = pick(self.plan.runs, left_out) if left_out is not None and len(self.plan.runs) > 1 else None
        for req_id, planned in self.plan.runs.items():
            if req_id == aborted:
                continue
            request, length = planned.request, planned.last - planned.first
            rows = list(range(self._next_row, self._next_row + length))
            self._next_row += length
            runs.append(Run(req_id, planned.first, rows, planned.slots, planned.drafts))
            sampled = 1 + min(accepted, planned.drafts)
            valid = length - planned.drafts - 1 + sampled
            if planned.drafts:
                counts[req_id] = sampled
            request.computed = planned.first + valid
            request.drafted = planned.drafts > 0
            request.known = max(request.known, request.computed + 1)
        self.plan = Plan()
        if aborted in self.live:
            self.plan.events.append(RequestEvent(Kind.ABORTED, aborted))
            self._forget(aborted)
        return runs, counts

    # -- helpers

    def _idle(self, *, on_hold=False):
        """Live requests the plan does not touch yet. `on_hold=None`: whether preempted or not."""
        touched = {event.req_id for event in self.plan.events} | set(self.plan.runs)
        return [r for r in self.live.values() if r.req_id not in touched and on_hold in (None, r.on_hold)]

    def _free(self, keep=()):
        taken = {block_id for r in self.live.values() if not r.on_hold for block_id in r.table} | set(keep)
        taken |= {copy.destination_block_id for copy in self.plan.copies}
        taken |= {block_id for block_id, _ in self.plan.written}
        return [block_id for block_id in range(1, self.num_blocks) if block_id not in taken]

    def _blocks_of(self, num_tokens):
        return -(-num_tokens // self.block_size)

    def _forget(self, req_id):
        request = self.live.pop(req_id)
        self.donors.append((tuple(request.table), request.computed))

    def _extend(self, request, stop):
        missing = self._blocks_of(stop) - len(request.table)
        if missing > 0:
            free = self._free()
            if len(free) < missing:
                return False
            request.table += free[:missing]
            self.plan.events.append(RequestEvent(Kind.EXTENDED, request.req_id, tuple(free[:missing])))
        return True

    def _enter(self, kind, req_id, donor, hit, known, chunk, way, own=None):
        """Take blocks for `known` tokens, `hit` of which are skipped, and run."""
        if own is None:
            table, tokens = pick([*self._donor_tables(), ((), 0)], donor)
        else:
            table, tokens = own.table, own.computed
        hit = min(hit, tokens)
        kept = list(table[: self._blocks_of(hit)])
        previous = self.live.get(req_id)
        if previous is not None:
            previous.on_hold = True  # what it had is free, but for what it keeps
        free = self._free(keep=kept)
        copies = []
        if hit % self.block_size and (own is None or way % 2) and free:
            copies = [BlockCopy(kept[-1], free[0])]
            kept[-1] = free.pop(0)
        fresh = self._blocks_of(known) - len(kept)
        shared_tail = hit % self.block_size and not copies and kept[-1] in self._taken_by_others(req_id)
        if len(free) < fresh or shared_tail:
            return
        block_ids = (*kept, *free[:fresh])
        digests = tuple(1 + (block_id + way // 4) % 3 for block_id in block_ids) if way % 4 == 3 else ()
        stop = min(hit + chunk, known)
        scheduled = (stop - hit, 0, 1)[way % 3]
        self.plan.copies += copies
        told_known = 0 if way % 7 == 6 else known
        # Of a request that is live it means nothing.
        adapter = (0, 0, *ADAPTERS)[way // 2 % 4]
        event = RequestEvent(kind, req_id, block_ids, hit, scheduled, told_known, digests, adapter)
        self.plan.events.append(event)
        self.live[req_id] = Request(req_id, list(block_ids), hit, known)
        self._run(self.live[req_id], hit, stop, 0, 0)

    def _taken_by_others(self, req_id):
        return {b for r in self.live.values() if r.req_id != req_id and not r.on_hold for b in r.table}

    def _donor_tables(self):
        ran_to = {req_id: run.last for req_id, run in self.plan.runs.items()}
        now = [(tuple(r.table), ran_to.get(r.req_id, r.computed)) for r in self.live.values()]
        return [*reversed(now), *reversed(self.donors)]

    def _run(self, request, first, stop, drafts, way):
        """Plan a run unless it would write where the step writes already."""
        last, size = stop + drafts, self.block_size
        if last <= first or self._blocks_of(last) > len(request.table):
            return
        slots = [(request.table[p // size], p % size) for p in range(first, last)]
        if way % 8 == 7:
            slots[0] = None
        if self.plan.written.isdisjoint(slots):
            self.plan.runs[request.req_id] = Planned(request, first, last, drafts, slots)
