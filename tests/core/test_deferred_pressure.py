# SPDX-License-Identifier: Apache-2.0
"""The budget of device bytes holds after every call, and the engine never waits for room in it.

`DeferredRig` checks the budget after each call of the cache; `CHUNK_BYTES` is what four rows of `mel` take.
"""

import random

import pytest
import torch
from cache_rig import SHORT_S, more, new
from deferred_rig import CHUNK_BYTES, CHUNK_ROWS, MEL, assert_both, deferred_rigs
from row_values import row_values

from omni_core.backend.memory import CARVE_ALIGNMENT_BYTES
from omni_core.prefix_cache.device_ring import DeviceRing
from omni_core.prefix_cache.errors import JoinTimeoutError


@pytest.fixture
def make_rig():
    with deferred_rigs() as make:
        yield make


def chunks_of(rig, req_id, count, after_each=lambda: None):
    """A request's steps, each a chunk of one block, left open."""
    steps = []
    for number in range(count):
        run = more(req_id, CHUNK_ROWS) if number else new(req_id, range(1, 1 + count), run=CHUNK_ROWS)
        steps.append(rig.step(run))
        after_each()
    return steps


@pytest.mark.parametrize("budget_chunks", [1, 2, 3, 5, 20])
def test_every_chunk_of_a_long_request_is_readable_in_order_whatever_the_budget(make_rig, budget_chunks):
    rig = make_rig(budget_bytes=budget_chunks * CHUNK_BYTES, staging_depth=12)
    chunks_of(rig, "A", 10)
    rows = rig.run(new("C", [*range(1, 11), 11], hit=40))["C"]
    assert_both(rows, ("A", 0, 40), ("C", 40, 44))


def test_room_for_one_more_record_like_the_last_is_kept_free(make_rig):
    rig = make_rig(budget_bytes=4 * CHUNK_BYTES, staging_depth=12)
    steps = chunks_of(rig, "A", 10, after_each=rig.settle)
    assert rig.on_device() == (3, 3 * CHUNK_BYTES, 1)
    assert rig.copies() == 7
    for index, step in enumerate(steps):
        assert_both(rig.take(step, "A")["A"], ("A", 4 * index, 4 * index + 4))
    assert rig.copies() == 10


def test_pressure_takes_the_oldest_records_whole_and_names_itself(make_rig):
    rig = make_rig(budget_bytes=4 * CHUNK_BYTES)
    rig.step(new("A", [1]), new("B", [2]))
    rig.settle()
    assert rig.on_device() == (1, 2 * CHUNK_BYTES, 2)
    with rig.held():
        rig.step(more("A", 4, blocks=[3]), more("B", 4, blocks=[4]))
        with pytest.raises(
            JoinTimeoutError, match=r"deferred records, for room in device_staging_bytes \(1 record\) \(write \d+, "
        ):
            rig.cache.flush(SHORT_S)


def test_while_copies_are_held_the_engine_goes_on_and_the_budget_holds(make_rig):
    """No room comes free: each further step's rows cross with its page, behind all older records."""
    rig = make_rig(budget_bytes=2 * CHUNK_BYTES, staging_depth=12)
    with rig.held():
        chunks_of(rig, "A", 10)
        assert rig.cache.stats().deferred_bytes == 2 * CHUNK_BYTES
        assert rig.cache.stats().deferred_records == 2
    assert_both(rig.run(new("C", [*range(1, 11), 11], hit=40))["C"], ("A", 0, 40), ("C", 40, 44))
    assert rig.cache.stats().deferred_bytes == 0


def test_a_record_as_large_as_the_budget_waits_for_nothing(make_rig):
    rig = make_rig(budget_bytes=2 * CHUNK_BYTES)
    rig.step(new("A", [1, 2], run=8))
    rig.settle()
    assert rig.on_device() == (0, 0, 0)
    assert rig.copies() == 1
    assert_both(rig.run(new("C", [1, 2, 3], hit=8))["C"], ("A", 0, 8), ("C", 8, 12))


def test_a_record_larger_than_a_bounce_buffer_is_copied_at_once(make_rig):
    """The buffers hold what deferred rows can take of a page beside the hidden rows of the largest step."""
    rig = make_rig(extra_row_bytes=0, extra_step_bytes=2 * CHUNK_BYTES)
    rig.step(new("A", [1, 2], run=8))
    rig.settle()
    assert rig.on_device() == (1, 2 * CHUNK_BYTES, 1)
    rig.step(new("B", [3, 4, 5], run=12))
    rig.settle()
    assert rig.on_device() == (0, 0, 0)
    taken = rig.run(new("C", [1, 2, 6], hit=8), new("D", [3, 4, 5, 7], hit=12, run=1))
    assert_both(taken["C"], ("A", 0, 8), ("C", 8, 12))
    assert_both(taken["D"], ("B", 0, 12), ("D", 12, 13))


@pytest.mark.parametrize("budget_bytes", [1, CARVE_ALIGNMENT_BYTES - 1])
def test_a_budget_too_small_for_any_row_is_none(make_rig, budget_bytes):
    rig = make_rig(budget_bytes=budget_bytes)
    rig.step(new("A", [1]))
    assert rig.on_device() == (0, 0, 0)
    assert_both(rig.run(new("C", [1, 2], hit=4))["C"], ("A", 0, 4), ("C", 4, 8))


def test_a_budget_is_counted_in_whole_carving_steps(make_rig):
    rig = make_rig(budget_bytes=3 * CHUNK_BYTES + 40, staging_depth=12)
    chunks_of(rig, "A", 5, after_each=rig.settle)
    assert rig.on_device() == (2, 2 * CHUNK_BYTES, 1)


def positions_in(ranges):
    return [position for start, stop in ranges for position in range(start, stop)]


class RandomEngine:
    """Chunks of any size, steps taken or given up in any order, ends, hits, and blocks that change hands."""

    def __init__(self, rig, seed):
        self._rig = rig
        self._rng = random.Random(seed)
        self._users = dict.fromkeys(range(1, rig.config.num_blocks), 0)
        self._content = {block: [] for block in self._users}
        """Block → who computed its rows, first row first, in its present tenancy."""
        self._tables = {}
        self._chains = []
        self._who = {}
        """Request → who computed its row, by position."""
        self._delivered = set()
        self._open = []
        self.rows_checked = 0

    def step(self):
        rng, rig = self._rng, self._rig
        finish = [req_id for req_id in list(self._tables) if rng.random() < 0.2]
        for req_id in finish:
            self._chains.append(self._tables.pop(req_id))
            for block in self._chains[-1]:
                self._users[block] -= 1
        runs = [run for req_id in self._tables if (run := self._more(req_id)) is not None]
        started = self._start(f"r{len(self._who)}")
        runs += [started] if started is not None else []
        if not runs:
            return rig.begin(finish=finish)
        rng.shuffle(runs)
        self._open.append((rig.step(*runs, finish=finish), [run.req_id for run in runs]))
        for item in rig.batch:
            for position in item.positions:
                self._who[item.req_id].append(item.req_id)
                self._content[self._tables[item.req_id][position // 4]].append((item.req_id, position))
        while len(self._open) == rig.config.staging_depth or (self._open and rng.random() < 0.4):
            self.end_one()
        return None

    def end_one(self):
        step, req_ids = self._open.pop(self._rng.randrange(len(self._open)))
        if self._rng.random() < 0.4:
            return self._rig.discard(step)
        taken = self._rig.take(step, *req_ids)
        assert taken.failed == {}
        for rows in taken.values():
            self._check(rows)
        return taken.release()

    def end_all(self):
        while self._open:
            self.end_one()

    def _check(self, rows):
        positions = positions_in(rows.ranges)
        assert self._delivered.isdisjoint((rows.req_id, position) for position in positions)
        self._delivered.update((rows.req_id, position) for position in positions)
        assert rows.ranges_of(MEL) == rows.ranges
        assert rows.zero_ranges == {}
        for key, (trailing, dtype) in self._rig.keys.items():
            positions = positions_in(rows.ranges_of(key))
            expected = [row_values(self._who[rows.req_id][at], [at], key, trailing, dtype) for at in positions]
            assert torch.equal(rows[key], torch.cat(expected)), f"{rows.req_id}, {key}: {rows.ranges}"
            self.rows_checked += len(positions)

    def _more(self, req_id):
        room = 4 * len(self._tables[req_id]) - len(self._who[req_id])
        return more(req_id, self._rng.randint(1, room)) if room and self._rng.random() < 0.7 else None

    def _start(self, req_id):
        hit = self._hit()
        free = [block for block, users in self._users.items() if not users and block not in hit]
        if len(free) < 3:
            return None
        own = self._rng.sample(free, 3)
        for block in own:
            self._content[block] = []
        self._tables[req_id] = [*hit, *own]
        for block in self._tables[req_id]:
            self._users[block] += 1
        self._who[req_id] = [who for block in hit for who, _ in self._content[block]]
        return new(req_id, self._tables[req_id], hit=4 * len(hit), run=self._rng.randint(1, 12))

    def _hit(self):
        """Whole blocks of a request, ended or live, as far as they still hold its rows."""
        chains = [*self._chains, *self._tables.values()]
        hit = []
        for index, block in enumerate(self._rng.choice(chains) if chains else ()):
            if [position for _, position in self._content[block]] != list(range(4 * index, 4 * index + 4)):
                break
            hit.append(block)
        return hit[: self._rng.randint(0, 3)]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("budget_chunks", [2, 6, 40])
def test_rows_are_right_under_any_budget(make_rig, budget_chunks, seed):
    rig = make_rig(
        budget_bytes=budget_chunks * CHUNK_BYTES,
        num_blocks=30,
        backend_options={"copy_parts": 2},
        needs_full_hidden_states=seed % 3 != 2,
    )
    engine = RandomEngine(rig, seed)
    for _ in range(40):
        engine.step()
    engine.end_all()
    assert engine.rows_checked > 100
    rig.cache.flush()
    assert rig.on_device() == (0, 0, 0)
    rig.assert_nothing_held()


# -- the ring itself


def test_the_ring_hands_bytes_out_in_one_piece_and_never_twice(make_rig):
    rig = make_rig(budget_bytes=0)
    rng = random.Random(7)
    ring = DeviceRing(rig.backend, 10 * 64 + 63, torch.device("cpu"))
    assert ring.capacity_bytes == ring.device_bytes == 10 * 64
    held = []
    wrapped = refused = 0
    for _ in range(2000):
        nbytes = 64 * rng.randint(1, 5)
        expected = ring.would_fit(nbytes, held[0] if held else None)
        ticket = ring.try_charge(nbytes)
        assert (ticket is not None) is expected
        if ticket is None:
            refused += 1
        else:
            wrapped += bool(held) and ticket.start < held[-1].start
            taken = {byte for each in held for byte in range(each.start, each.start + each.nbytes, 64)}
            assert taken.isdisjoint(range(ticket.start, ticket.start + nbytes, 64))
            assert ticket.start + nbytes <= ring.capacity_bytes
            held.append(ticket)
        assert ring.charged_bytes == sum(each.nbytes for each in held) <= ring.capacity_bytes
        assert ring.num_charged == len(held)
        while held and (ticket is None or rng.random() < 0.4):
            # Mostly the oldest; one in between leaves its bytes taken until the older ones are returned.
            ring.give_back(held.pop(0 if rng.random() < 0.8 else rng.randrange(len(held))))
            ticket = ring
    assert wrapped > 100
    assert refused > 100
    for each in held:
        ring.give_back(each)
    assert ring.charged_bytes == 0
    with pytest.raises(RuntimeError, match="returned twice"):
        ring.give_back(held[0])
    ring.close()


def test_would_fit_answers_for_the_time_when_the_older_tickets_are_back(make_rig):
    ring = DeviceRing(make_rig(budget_bytes=0).backend, 4 * 64, torch.device("cpu"))
    first, second, third = (ring.try_charge(64) for _ in range(3))
    assert ring.would_fit(64, first)
    assert not ring.would_fit(128, first)
    assert not ring.would_fit(128, second)
    assert ring.would_fit(128, third)
    assert ring.would_fit(256, None)
    assert not ring.would_fit(257, None)
    for ticket in (first, second):
        ring.give_back(ticket)
    assert ring.try_charge(128).start == 0
    assert ring.try_charge(128) is None
    ring.close()
