# SPDX-License-Identifier: Apache-2.0
"""Drives the public API of the prefix cache the way an engine does, with a block-table arithmetic of its own."""

from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from controlled_runtime import PATIENCE_S, ControlledRuntime
from omni_core_cpu_sim import CpuSimBackend
from row_values import row_values

from omni_core.prefix_cache.config import HIDDEN_KEY, PrefixCacheConfig
from omni_core.prefix_cache.events import BlockCopy, RequestEvent, RequestEventKind, StepEvents, StepLayout
from omni_core.prefix_cache.manager import OmniPrefixCacheManager

SHORT_S = 0.05
"""A time limit that is meant to pass."""
BRIEF_S = 1.0
"""The same, for a cache that afterwards has to serve within the same limit on a loaded machine."""


@dataclass(frozen=True)
class Run:
    """What one request does in a step: `run` rows, from where it stopped or from `at`."""

    req_id: str
    run: int
    blocks: tuple = ()
    hit: int | None = None
    at: int | None = None
    kind: RequestEventKind = RequestEventKind.STARTED
    known: int = 0
    drafts: int = 0
    content: str | None = None
    adapter: int = 0

    @property
    def is_new(self):
        return self.hit is not None


def new(req_id, blocks, hit=0, run=4, adapter=0, content=None):
    """A request scheduled for the first time: its whole table, its prefix hit, its rows this step.

    `content`: whose rows it computes, if not its own.
    """
    return Run(req_id, run, tuple(blocks), hit, adapter=adapter, content=content)


def more(req_id, run=1, blocks=(), at=None, drafts=0):
    """A live request goes on; `blocks` are appended to its table. The last `drafts` rows are of draft tokens."""
    return Run(req_id, run, tuple(blocks), None, at, drafts=drafts)


def back(req_id, blocks, hit=0, run=4, known=0):
    """A preempted request comes back: its whole new table, its fresh hit, its rows this step."""
    return Run(req_id, run, tuple(blocks), hit, kind=RequestEventKind.RESUMED, known=known)


def replaced(req_id, blocks, hit=0, run=4, content=None, adapter=0):
    """A request's content changes: its whole table, the tokens it keeps. `content`: whose rows it computes from now."""
    return Run(req_id, run, tuple(blocks), hit, kind=RequestEventKind.REPLACED, content=content, adapter=adapter)


@dataclass(frozen=True)
class Batched:
    """A request's rows in the step under way."""

    req_id: str
    first: int
    last: int
    slots: tuple
    drafts: int
    content: str

    @property
    def positions(self):
        return range(self.first, self.last)


class CacheRig:
    """One cache on one simulator. The test is the engine thread."""

    def __init__(
        self,
        *,
        runtime=None,
        backend=None,
        backend_options=None,
        policy=None,
        hidden=3,
        dtype=torch.float32,
        keys=None,
        **settings,
    ):
        """`keys`: further outputs, name → (trailing shape, dtype). `settings`: of `PrefixCacheConfig`."""
        settings = {
            "num_blocks": 16,
            "block_size": 4,
            "max_num_tokens": 64,
            "staging_claim_timeout_s": PATIENCE_S,
            "join_timeout_s": PATIENCE_S,
        } | settings
        self.config = PrefixCacheConfig(hidden_size=hidden, hidden_dtype=dtype, **settings)
        self.runtime = runtime or ControlledRuntime()
        self.backend = backend or CpuSimBackend(self.runtime, **(backend_options or {}))
        self.keys = {HIDDEN_KEY: ((hidden,), dtype)} | (keys or {})
        self.cache = OmniPrefixCacheManager(
            self.config, self.backend, self._give_layout, runtime=self.runtime, device=torch.device("cpu")
        )
        if policy is not None:
            self.cache.register_policy(policy)
        self.batch = []
        self.layout_calls = 0
        self._layout = None
        self._tables = {}
        self._computed = {}
        self._contents = {}

    # -- what an engine does

    def begin(self, *runs, finish=(), abort=(), copies=(), events=()):
        """Announce a step. `events` are further `RequestEvent`s."""
        told = [RequestEvent(RequestEventKind.FINISHED, req_id) for req_id in finish]
        told += [RequestEvent(RequestEventKind.ABORTED, req_id) for req_id in abort]
        told += events
        for req_id in (*finish, *abort):
            self._tables.pop(req_id, None)
            self._computed.pop(req_id, None)
            self._contents.pop(req_id, None)
        told += self.schedule(*runs)
        self.cache.new_step_starts(
            StepEvents(tuple(told), tuple(BlockCopy(source, destination) for source, destination in copies))
        )

    def begin_as(self, events, *runs):
        """Announce exactly `events`, whatever the engine then runs."""
        self.schedule(*runs)
        self.cache.new_step_starts(StepEvents(tuple(events)))

    def schedule(self, *runs):
        """Make these runs the step under way; returns what the cache would have to be told."""
        told = []
        self.batch = []
        for run in runs:
            if run.is_new:
                self._tables[run.req_id] = list(run.blocks)
                self._computed[run.req_id] = run.hit
                if run.content is not None:
                    self._contents[run.req_id] = run.content
                told.append(
                    RequestEvent(run.kind, run.req_id, run.blocks, run.hit, run.run, run.known, adapter_id=run.adapter)
                )
            elif run.blocks:
                self._tables[run.req_id] += run.blocks
                told.append(RequestEvent(RequestEventKind.EXTENDED, run.req_id, run.blocks))
            first = self._computed[run.req_id] if run.at is None else run.at
            last = first + run.run
            self._computed[run.req_id] = last
            content = self._contents.get(run.req_id, run.req_id)
            slots = self.slots_of(run.req_id, first, last)
            self.batch.append(Batched(run.req_id, first, last, slots, run.drafts, content))
        return told

    def slots_of(self, req_id, first, last):
        table, size = self._tables[req_id], self.config.block_size
        return tuple(table[position // size] * size + position % size for position in range(first, last))

    def retable(self, req_id, blocks):
        """The engine rewrites a request's block table."""
        self._tables[req_id] = list(blocks)

    @property
    def num_tokens(self):
        return sum(item.last - item.first for item in self.batch)

    def layout(self):
        """The step's layout, as a runner would report it."""
        lengths = [item.last - item.first for item in self.batch]
        return StepLayout(
            tuple(item.req_id for item in self.batch),
            np.cumsum([0, *lengths]),
            np.array([position for item in self.batch for position in item.positions], np.int64),
            np.array([slot for item in self.batch for slot in item.slots], np.int64),
            np.array([item.drafts for item in self.batch]) if any(item.drafts for item in self.batch) else None,
        )

    def rows(self, key=HIDDEN_KEY, pad=0):
        """The forward's output `key` for the step under way, with `pad` rows of -1 behind the real ones."""
        trailing, dtype = self.keys[key]
        parts = [row_values(item.content, item.positions, key, trailing, dtype) for item in self.batch]
        return torch.cat([*parts, torch.full((pad, *trailing), -1).to(dtype)])

    def save(self, outputs=None, *, hidden=True, keys=None, pad=0, layout=None, padded=None):
        """Hand the step's outputs over.

        `hidden`: `True` for the right rows, or what to pass instead. `keys`: which further keys to bring (all). `pad`:
        graph padding behind every output.
        """
        brought = [key for key in self.keys if key != HIDDEN_KEY] if keys is None else keys
        everything = {key: self.rows(key, pad) for key in brought} | (outputs or {})
        self._layout = layout
        if hidden is True:
            hidden = self.rows(pad=pad)
        return self.cache.save_outputs(
            hidden,
            everything,
            num_tokens_unpadded=self.num_tokens,
            num_tokens_padded=self.num_tokens + pad if padded is None else padded,
        )

    def step(self, *runs, finish=(), abort=(), copies=(), events=(), **saving):
        """`begin`, the forward, `save`; returns the step id."""
        self.begin(*runs, finish=finish, abort=abort, copies=copies, events=events)
        return self.save(**saving)

    def take(self, step_id, *req_ids, counts=None):
        """Materialise a step for `req_ids`; without any, for all requests of the step under way."""
        return self.cache.materialize(step_id, req_ids or [item.req_id for item in self.batch], counts)

    def run(self, *runs, counts=None, **options):
        """A whole step whose rows are taken at once."""
        return self.take(self.step(*runs, **options), counts=counts)

    def _give_layout(self):
        self.layout_calls += 1
        return self.layout() if self._layout is None else self._layout

    # -- control and checks

    def held(self):
        """Hold every copy back until the block ends."""
        return self.backend.hold_copies()

    def wait_until_copying(self):
        """Until the committer has taken a write and waits for its copy."""
        self.runtime.wait_until_waiting("omni-core-committer", on="omni-core-copy")

    def call(self, name, function):
        return self.runtime.call(name, function)

    def taking(self, step_id, *req_ids, thread="taker"):
        """`take` on a thread of its own, at the point where it sleeps."""
        asked = req_ids or tuple(item.req_id for item in self.batch)
        call = self.call(thread, lambda: self.cache.materialize(step_id, asked))
        self.runtime.wait_until_waiting(thread)
        assert not call.done
        return call

    def stats(self):
        """The cache's numbers once every write has landed: equal before and after a call that changed nothing."""
        self.cache.flush(PATIENCE_S)
        return self.cache.stats()

    def held_resources(self):
        """What steps, reads and writes hold now."""
        stats = self.cache.stats()
        return {
            "open_steps": stats.open_steps,
            "live_reads": stats.live_reads,
            "pinned_slots": stats.pinned_slots,
            "queued_writes": stats.queued_writes,
            "staging_slots_in_use": stats.staging_slots_in_use,
        }

    def assert_nothing_held(self):
        """No step, read, pin, write or staging slot is held once the helper threads have nothing left to do."""
        self.runtime.comes_true(lambda: not any(self.held_resources().values()))
        held = self.held_resources()
        assert held == dict.fromkeys(held, 0)

    def stop(self):
        """Close cache and backend; nothing may be left."""
        self.backend.copy_gate.release_copies()
        assert self.cache.close(PATIENCE_S) is True
        self.backend.close()
        assert self.runtime.living_threads() == []
        assert self.backend.pinned_bytes == 0
        assert self.backend.device_bytes == 0


@contextmanager
def rig_maker():
    """Makes rigs, and closes them when the block ends; each must close without a rest."""
    made = []

    def make(**options):
        made.append(CacheRig(**options))
        return made[-1]

    yield make
    for rig in made:
        rig.stop()
