# SPDX-License-Identifier: Apache-2.0
"""Any sequence of calls an engine and a consumer can make, against a model of dictionaries that says what each returns.

Hypothesis picks the calls and shrinks a sequence that goes wrong to the shortest that does.
"""

import numpy as np
import pytest
import torch
from delivery_checks import KEYS, PATIENCE_S, Handed, LateCall, ranges_of, tensor_of
from dictionary_model import DictionaryModel
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from omni_core_cpu_sim import CpuSimBackend
from small_engine import SmallEngine, pick

from omni_core.prefix_cache.config import HIDDEN_KEY, Delivery, PrefixCacheConfig
from omni_core.prefix_cache.errors import (
    BlockSizeMismatchError,
    CacheFailedError,
    DraftCountError,
    DraftCountMissingError,
    KeyShapeChangedError,
    LayoutMismatchError,
    RequestNotInStepError,
    SlotOutOfRangeError,
    StepAlreadyDiscardedError,
    StepAlreadyMaterializedError,
    StepOrderError,
    UnknownStepError,
)
from omni_core.prefix_cache.events import RequestEvent, RequestEventKind, StepEvents, StepLayout
from omni_core.prefix_cache.manager import OmniPrefixCacheManager
from omni_core.prefix_cache.policy import ModelCachePolicy
from omni_core.runtime import ThreadingRuntime

NUM_BLOCKS = 9
MAX_TOKENS = 24
STAGING_DEPTH = 3
FURTHER_KEYS = sorted(set(KEYS) - {HIDDEN_KEY})
GARBAGE = -7
ONE_ROW = {"num_tokens_unpadded": 1, "num_tokens_padded": 1}
RIGHT_LAYOUT = {"starts": [0, 1], "positions": [0], "slots": [0], "num_draft_tokens": [0]}
WRONG_STEPS = (
    (LayoutMismatchError, {"starts": [0, 2]}),
    (LayoutMismatchError, {"positions": [-1]}),
    (LayoutMismatchError, {"num_draft_tokens": [1]}),
    (SlotOutOfRangeError, {"slots": [NUM_BLOCKS * 3]}),
    (BlockSizeMismatchError, {"positions": [1]}),
    (KeyShapeChangedError, {"hidden": torch.zeros(1, 4)}),
    (LayoutMismatchError, {"hidden": torch.zeros(2, 3)}),
)
"""The error, and what differs from `RIGHT_LAYOUT` and one hidden row."""

few = st.integers(0, 7)
lengths = st.integers(1, 5)
hits = st.integers(0, 8)
prompts = st.integers(1, 9)
actions = st.one_of(
    st.tuples(st.just("start"), few, few, hits, prompts, lengths, few),
    st.tuples(st.just("start"), few, few, hits, prompts, lengths, few),
    st.tuples(st.just("go_on"), few, lengths, st.sampled_from([0, 0, 1, 2]), few),
    st.tuples(st.just("go_on"), few, lengths, st.sampled_from([0, 0, 1, 2]), few),
    st.tuples(st.just("come_back"), few, few, hits, lengths, st.integers(0, 15)),
    st.tuples(st.just("next_chunk"), few, lengths, lengths, few),
    st.tuples(st.just("replace"), few, hits, prompts, lengths, few),
    st.tuples(st.just("end"), few, few),
    st.tuples(st.just("preempt"), few),
    st.tuples(st.just("copy"), few, few),
    st.tuples(st.just("fill"), few, st.integers(1, 4)),
    st.tuples(st.just("misbehave"), few, few),
)
plans = st.lists(actions, min_size=1, max_size=4)
savings = st.tuples(
    st.sets(st.sampled_from(FURTHER_KEYS)),
    st.sampled_from([0, 0, 1, 4]),
    few,
    st.sampled_from([None, None, None, None, 0, 1]),
    st.integers(0, 2),
    st.sampled_from([True, True, True, False]),
)
"""Further keys, padding rows, batch order, who is left out, drafts accepted, whether owed rows are carried."""


class CacheMachine(RuleBasedStateMachine):
    """The engine thread is the test's."""

    @initialize(
        block_size=st.integers(1, 3),
        two_phase=st.booleans(),
        stores_hidden=st.sampled_from([True, True, True, False]),
        deferred=st.sets(st.sampled_from(FURTHER_KEYS)),
        device_staging_bytes=st.sampled_from([0, 300, 4_000]),
    )
    def make(self, block_size, two_phase, stores_hidden, deferred, device_staging_bytes):
        self.runtime = ThreadingRuntime()
        self.backend = CpuSimBackend(self.runtime, copy_parts=2)
        self.two_phase = two_phase
        self.layout = None
        config = PrefixCacheConfig(
            num_blocks=NUM_BLOCKS,
            block_size=block_size,
            hidden_size=3,
            hidden_dtype=torch.float32,
            max_num_tokens=MAX_TOKENS,
            staging_depth=STAGING_DEPTH,
            staging_claim_timeout_s=PATIENCE_S,
            join_timeout_s=PATIENCE_S,
            delivery=Delivery.TWO_PHASE if two_phase else Delivery.ON_MATERIALIZE,
            device_staging_bytes=device_staging_bytes,
        )
        self.cache = OmniPrefixCacheManager(
            config, self.backend, lambda: self.layout, runtime=self.runtime, device=torch.device("cpu")
        )
        self.cache.register_policy(
            ModelCachePolicy(
                token_keys=frozenset(FURTHER_KEYS) - deferred,
                deferred_keys=frozenset(deferred),
                needs_full_hidden_states=stores_hidden,
            )
        )
        self.device_staging_bytes = device_staging_bytes
        self.model = DictionaryModel(block_size, NUM_BLOCKS, stores_hidden=stores_hidden)
        self.engine = SmallEngine(block_size, NUM_BLOCKS)
        self.open = {}
        self.consumed = {}
        self.late_calls = []
        self.handed = []
        self.hold = None
        self.saved_since_hold = 0
        self.next_row = 1

    def teardown(self):
        if not hasattr(self, "cache"):
            return
        self.let_late_calls_return()
        for handed in self.handed:
            handed.check()
        self.cache.flush()
        assert self.cache.stats().deferred_records == 0
        closed = self.cache.close(PATIENCE_S)
        self.backend.close()
        assert closed

    # -- the engine

    @rule(plan=plans, saving=savings)
    def step(self, plan, saving):
        self.begin(plan)
        self.save(*saving)

    @rule(plan=plans, then=st.integers(0, 5), which=few, saving=savings)
    def step_meanwhile(self, plan, then, which, saving):
        """The forward is lost, or a consumer comes between announcement and save."""
        self.begin(plan)
        if then == 0:
            self.engine.lose()
        elif self.open:
            self.discard(which) if then == 1 else self.materialize(which, None)
        self.save(*saving)

    @rule(drafts=st.sampled_from([0, 0, 1, 2]), saving=savings)
    def everyone_goes_on(self, drafts, saving):
        self.begin([("go_on", number, 2, drafts, 0) for number in reversed(range(len(self.engine.live)))])
        self.save(*saving)

    @rule(donor=few, hit=hits, way=st.integers(0, 15), saving=savings)
    def everyone_comes_back(self, donor, hit, way, saving):
        """All were preempted."""
        self.begin([("come_back", number, donor, hit, 9, way) for number in reversed(range(len(self.engine.live)))])
        self.save(*saving)

    def begin(self, plan):
        for name, *numbers in plan:
            getattr(self.engine, name)(*numbers)
        events = self.engine.begin()
        self.cache.new_step_starts(events)
        self.model.step_starts(events)

    def save(self, keys, padding, order, left_out, accepted, carry_owed):
        if not self.engine.plan.runs:
            return
        self.make_room()
        runs, counts = self.forward(order, left_out, accepted)
        outputs, sizes = self.outputs_of(runs, keys, padding)
        further = {key: rows for key, rows in outputs.items() if key != HIDDEN_KEY}
        step_id = self.cache.save_outputs(outputs[HIDDEN_KEY], further, **sizes, carry_owed=carry_owed)
        for rows in outputs.values():
            rows.fill_(GARBAGE)
        self.model.save(step_id, runs, tuple(outputs), carry_owed=carry_owed)
        self.open[step_id] = counts
        self.saved_since_hold += 1

    def forward(self, order=0, left_out=None, accepted=0):
        runs, counts = self.engine.forward(left_out, accepted, self.next_row)
        self.next_row += sum(len(run.rows) for run in runs)
        runs = [*runs[order % len(runs) :], *runs[: order % len(runs)]]
        size = self.engine.block_size
        self.set_layout(
            [run.req_id for run in runs],
            starts=np.cumsum([0, *(len(run.rows) for run in runs)]),
            positions=[position for run in runs for position in range(run.first, run.last)],
            slots=[-1 if slot is None else slot[0] * size + slot[1] for run in runs for slot in run.slots],
            num_draft_tokens=[run.drafts for run in runs],
        )
        return runs, counts

    def set_layout(self, req_ids, **columns):
        self.layout = StepLayout(tuple(req_ids), **{name: np.array(given) for name, given in columns.items()})

    def outputs_of(self, runs, keys, padding):
        numbers = [row for run in runs for row in run.rows]
        outputs = {key: tensor_of(key, numbers + [GARBAGE] * padding) for key in (HIDDEN_KEY, *sorted(keys))}
        return outputs, {"num_tokens_unpadded": len(numbers), "num_tokens_padded": len(numbers) + padding}

    def make_room(self):
        """A staging slot is free, or will be once writes have landed."""
        while len(self.open) >= STAGING_DEPTH:
            self.discard(0) if len(self.consumed) % 3 == 0 else self.materialize(0, None)
        if self.hold is not None and len(self.open) + len(self.late_calls) + self.saved_since_hold >= STAGING_DEPTH:
            self.let_late_calls_return()

    # -- the consumer

    @precondition(lambda self: self.open)
    @rule(which=few, left_out=st.sampled_from([None, None, None, 0, 1, 2]))
    def materialize(self, which, left_out):
        self.let_late_calls_return()
        step_id = pick(self.open, which)
        every = list(self.model.steps[step_id].runs)
        left = None if left_out is None else pick(every, left_out)
        asked = [req_id for req_id in every if req_id != left]
        counts = self.consume(step_id, StepAlreadyMaterializedError)
        outputs = self.cache.materialize(step_id, asked, counts)
        self.take(Handed(outputs, *self.model.materialize(step_id, asked, counts, two_phase=self.two_phase)))

    @precondition(lambda self: any(map(self.can_come_late, self.open)))
    @rule(which=few)
    def materialize_on_another_thread(self, which):
        """It returns when copies are let through; the engine goes on meanwhile."""
        step_id = pick(filter(self.can_come_late, self.open), which)
        asked = list(self.model.steps[step_id].runs)
        counts = self.consume(step_id, StepAlreadyMaterializedError)
        expected = self.model.materialize(step_id, asked, counts, two_phase=self.two_phase)
        call = LateCall(self.runtime, lambda: self.cache.materialize(step_id, asked, counts), *expected)
        self.late_calls.append(call)
        while self.cache.stats().steps_materialized < self.model.counts["materialized"]:
            self.runtime.sleep(0.0005)

    def can_come_late(self, step_id):
        """When the call settles does not matter: it serves every request, and none of them backs off."""
        step = self.model.steps[step_id]
        return not step.failed and not any(saved.life.backs_off for saved in step.runs.values())

    @precondition(lambda self: self.open)
    @rule(which=few)
    def discard(self, which):
        self.let_late_calls_return()
        step_id = pick(self.open, which)
        counts = self.consume(step_id, StepAlreadyDiscardedError)
        self.cache.discard_step(step_id, counts)
        self.model.discard(step_id, counts)

    def consume(self, step_id, then):
        """The step is used up now; `then` is what a second use raises. Returns its sampled counts."""
        self.consumed[step_id] = then
        return self.open.pop(step_id)

    def take(self, handed):
        handed.check()
        self.handed.append(handed)

    def let_late_calls_return(self):
        self.let_copies_through()
        calls, self.late_calls = self.late_calls, []
        for call in calls:
            self.take(call.result())

    def hold_copies(self):
        while self.cache.stats().staging_slots_in_use > len(self.open):
            self.runtime.sleep(0.0005)
        self.hold = self.backend.hold_copies()
        self.hold.__enter__()
        self.saved_since_hold = 0

    def let_copies_through(self):
        if self.hold is not None:
            self.hold.__exit__(None, None, None)
            self.hold = None

    @precondition(lambda self: self.handed)
    @rule(which=few, how=st.sampled_from(["acknowledge", "acknowledge one", "release", "release"]))
    def hand_back(self, which, how):
        self.let_late_calls_return()
        handed = pick(self.handed, which)
        if how == "release":
            self.release(handed)
            return
        chosen = list(handed.served)[:1] if how == "acknowledge one" else None
        handed.outputs.acknowledge(chosen)
        if self.two_phase:
            for req_id in handed.served if chosen is None else chosen:
                if req_id in handed.unacknowledged:
                    self.model.acknowledge(handed.unacknowledged.pop(req_id))

    def release(self, handed):
        self.handed.remove(handed)
        handed.check()
        handed.outputs.release()
        if self.two_phase:
            for expected in handed.unacknowledged.values():
                self.model.give_up(expected)
            if handed.unacknowledged:
                with pytest.raises(StepOrderError):
                    handed.outputs.acknowledge()

    # -- now and then

    @rule(
        what=st.sampled_from(
            ["hold", "hold", "hold", "flush", "flush", "take partial", "take partial", "reset", "fail", *["misuse"] * 6]
        ),
        which=st.integers(0, 41),
    )
    def now_and_then(self, what, which):
        held = self.hold is not None
        self.let_late_calls_return()
        if what == "hold" and not held:
            self.hold_copies()
        elif what == "flush":
            self.cache.flush()
        elif what == "take partial":
            self.take_partial_requests()
        elif what == "reset":
            self.reset(failure=None)
        elif what == "fail" and self.model.under_way is not None and self.engine.plan.runs:
            self.a_copy_fails()
        elif what == "misuse":
            self.cache.flush()
            self.misuse(*divmod(which, 7))

    def take_partial_requests(self):
        found = [(report.req_id, report.missing) for report in self.cache.take_partial_requests()]
        expected = [(req_id, ranges_of(missing)) for req_id, missing in self.model.take_partial()]
        assert sorted(found) == sorted(expected)

    def reset(self, failure):
        report = self.cache.reset()
        rows, requests, steps = self.model.reset()
        assert report.failure_cleared == failure
        assert dict(report.rows_cleared) == rows
        assert (report.requests_forgotten, report.steps_dropped) == (requests, steps)
        for step_id in list(self.open):
            self.consume(step_id, StepAlreadyDiscardedError)

    def a_copy_fails(self):
        """It is said by every call until the cache is reset, and the step is used up."""
        self.make_room()
        self.cache.flush()
        lost = OSError("the device lost the page")
        self.backend.copy_gate.fail_next_copy(lost)
        self.save((), 0, 0, None, 0, True)
        step_id = max(self.open)
        asked = list(self.model.steps[step_id].runs)
        counts = self.consume(step_id, StepAlreadyMaterializedError)
        for call in (
            self.cache.flush,
            lambda: self.cache.materialize(step_id, asked, counts),
            lambda: self.cache.new_step_starts(StepEvents()),
        ):
            with pytest.raises(CacheFailedError, match="lost the page"):
                call()
        self.model.materialize(step_id, (), counts)
        self.reset(failure=repr(lost))

    # -- misuse changes nothing

    def misuse(self, what, which):
        if what == 0:
            self.use_a_step_that_is_not_open(pick(self.consumed, which))
        elif what in (1, 2) and self.open:
            self.ask_wrongly(pick(self.open, which))
        elif what == 3:
            event = RequestEvent(RequestEventKind.STARTED, "a", (1, NUM_BLOCKS))
            self.assert_refused(SlotOutOfRangeError, self.cache.new_step_starts, StepEvents((event,)))
        elif what == 4 and self.two_phase and self.handed:
            self.assert_refused(RequestNotInStepError, pick(self.handed, which).outputs.acknowledge, ["nobody"])
        else:
            self.save_wrongly(*WRONG_STEPS[which % len(WRONG_STEPS)])

    def assert_refused(self, error, call, *args, **options):
        before = self.cache.stats()
        with pytest.raises(error):
            call(*args, **options)
        assert self.cache.stats() == before

    def use_a_step_that_is_not_open(self, consumed):
        for step_id in {10_000, consumed} - {None}:
            error = self.consumed.get(step_id, UnknownStepError)
            self.assert_refused(error, self.cache.materialize, step_id, [])
            self.assert_refused(error, self.cache.discard_step, step_id)

    def ask_wrongly(self, step_id):
        counts = self.open[step_id]
        self.assert_refused(RequestNotInStepError, self.cache.materialize, step_id, ["nobody"], counts)
        for req_id in counts:
            for wrong in (-1, MAX_TOKENS):
                self.assert_refused(DraftCountError, self.cache.materialize, step_id, [], counts | {req_id: wrong})
                self.assert_refused(DraftCountError, self.cache.discard_step, step_id, counts | {req_id: wrong})
            missing = {other: count for other, count in counts.items() if other != req_id}
            self.assert_refused(DraftCountMissingError, self.cache.materialize, step_id, [], missing)
            self.assert_refused(DraftCountMissingError, self.cache.discard_step, step_id)

    def save_wrongly(self, error, changes):
        columns = RIGHT_LAYOUT | changes
        hidden = columns.pop("hidden", torch.zeros(1, 3))
        if self.engine.block_size == 1 and error is BlockSizeMismatchError:
            return
        self.set_layout(["a"], **columns)
        self.assert_refused(error, self.cache.save_outputs, hidden, {}, **ONE_ROW)
        if self.model.under_way is None:
            self.set_layout(["a"], **RIGHT_LAYOUT)
            self.assert_refused(StepOrderError, self.cache.save_outputs, torch.zeros(1, 3), {}, **ONE_ROW)

    # -- always

    @invariant()
    def the_counters_are_right(self):
        if not hasattr(self, "cache") or self.late_calls:
            return
        stats, model = self.cache.stats(), self.model
        assert {
            "saved": stats.steps_saved,
            "materialized": stats.steps_materialized,
            "discarded": stats.steps_discarded,
            "rows": stats.rows_delivered,
            "from_hits": stats.rows_from_hits,
            "failed": stats.requests_failed,
        } == model.counts
        assert stats.open_steps == len(model.steps)
        assert stats.live_requests == len(model.live)
        assert stats.deferred_bytes <= self.device_staging_bytes
        if not model.steps and not model.under_way:
            assert (stats.live_reads, stats.pinned_slots) == (0, 0)


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(stateful_step_count=30)
