# SPDX-License-Identifier: Apache-2.0
"""Any sequence of calls an engine and a consumer can make, against a model of dictionaries that says what each returns.

Hypothesis picks the calls and shrinks a sequence that goes wrong to the shortest that does.
"""

from typing import NamedTuple

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from modelled_cache import FURTHER_KEYS, MAX_TOKENS, NUM_BLOCKS, ModelledCache
from small_engine import ADAPTERS, SmallEngine, pick

from omni_core.prefix_cache.errors import (
    BlockSizeMismatchError,
    DraftCountError,
    DraftCountMissingError,
    KeyShapeChangedError,
    LayoutMismatchError,
    RequestNotInStepError,
    SlotOutOfRangeError,
    StepOrderError,
    UnknownStepError,
)
from omni_core.prefix_cache.events import RequestEvent, RequestEventKind, StepEvents

ONE_ROW = {"num_tokens_unpadded": 1, "num_tokens_padded": 1}
RIGHT_LAYOUT = {"starts": [0, 1], "positions": [0], "slots": [0], "num_draft_tokens": [0]}
NEW_WEIGHTS = (None, *ADAPTERS)
"""The weights, or an adapter."""
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


class Saving(NamedTuple):
    """How a step is saved."""

    keys: list
    """The further keys it brings."""
    padding: int
    order: int
    """Rotates the batch."""
    left_out: int | None
    """A request that is aborted before the forward."""
    accepted: int
    """Most drafts accepted of a request."""
    carry_owed: bool


few = st.integers(0, 7)
lengths = st.integers(1, 5)
hits = st.integers(0, 8)
prompts = st.integers(1, 9)
ways = st.integers(0, 15)
actions = st.one_of(
    st.tuples(st.just("start"), few, few, hits, prompts, lengths, few),
    st.tuples(st.just("start"), few, few, hits, prompts, lengths, few),
    st.tuples(st.just("go_on"), few, lengths, st.sampled_from([0, 0, 1, 2]), few),
    st.tuples(st.just("go_on"), few, lengths, st.sampled_from([0, 0, 1, 2]), few),
    st.tuples(st.just("come_back"), few, few, hits, lengths, ways),
    st.tuples(st.just("next_chunk"), few, lengths, lengths, few),
    st.tuples(st.just("replace"), few, hits, prompts, lengths, few),
    st.tuples(st.just("end"), few, few),
    st.tuples(st.just("preempt"), few),
    st.tuples(st.just("copy"), few, few),
    st.tuples(st.just("fill"), few, st.integers(1, 4)),
    st.tuples(st.just("misbehave"), few, few),
)
plans = st.lists(actions, min_size=1, max_size=4)
savings = st.builds(
    Saving,
    keys=st.sets(st.sampled_from(FURTHER_KEYS)).map(sorted),
    padding=st.sampled_from([0, 0, 1, 4]),
    order=few,
    left_out=st.sampled_from([None, None, None, None, 0, 1]),
    accepted=st.integers(0, 2),
    carry_owed=st.sampled_from([True, True, True, False]),
)


class CacheMachine(RuleBasedStateMachine):
    """The engine thread is the test's."""

    both = None

    @initialize(
        block_size=st.integers(1, 3),
        two_phase=st.booleans(),
        stores_hidden=st.sampled_from([True, True, True, False]),
        deferred=st.sets(st.sampled_from(FURTHER_KEYS)),
        device_staging_bytes=st.sampled_from([0, 300, 4_000]),
    )
    def make(self, block_size, **options):
        self.both = ModelledCache(block_size, **options)
        self.cache = self.both.cache
        self.engine = SmallEngine(block_size, NUM_BLOCKS)

    def teardown(self):
        if self.both is not None:
            self.both.close()

    # -- the engine

    @rule(plan=plans, saving=savings)
    def step(self, plan, saving):
        self.begin(plan)
        self.save(saving)

    @rule(plan=plans, then=st.integers(0, 6), which=few, saving=savings)
    def step_meanwhile(self, plan, then, which, saving):
        """The forward is lost, or a consumer comes between announcement and save."""
        self.begin(plan)
        if then == 0:
            self.engine.lose()
        elif then == 6:
            self.both.bump(pick(NEW_WEIGHTS, which))
        elif self.both.open:
            (self.both.discard if then == 1 else self.both.materialize)(pick(self.both.open, which))
        self.save(saving)

    @rule(drafts=st.sampled_from([0, 0, 1, 2]), saving=savings)
    def everyone_goes_on(self, drafts, saving):
        self.begin([("go_on", number, 2, drafts, 0) for number in reversed(range(len(self.engine.live) or 1))])
        self.save(saving)

    @rule(donor=few, hit=hits, way=ways, saving=savings)
    def everyone_comes_back(self, donor, hit, way, saving):
        """All were preempted."""
        self.begin([("come_back", number, donor, hit, 9, way) for number in reversed(range(len(self.engine.live)))])
        self.save(saving)

    def begin(self, plan):
        for name, *numbers in plan:
            getattr(self.engine, name)(*numbers)
        self.both.begin(self.engine.begin())

    def save(self, saving):
        if self.engine.plan.runs:
            runs, counts = self.engine.forward(saving.left_out, saving.accepted)
            first = saving.order % len(runs)
            runs = [*runs[first:], *runs[:first]]
            self.both.save(runs, counts, saving.keys, saving.padding, carry_owed=saving.carry_owed)

    # -- the consumer

    @precondition(lambda self: self.both.open)
    @rule(which=few, left_out=st.sampled_from([None, None, None, 0, 1, 2]))
    def materialize(self, which, left_out):
        step_id = pick(self.both.open, which)
        asked = self.both.requests_of(step_id)
        if left_out is not None:
            asked.remove(pick(asked, left_out))
        self.both.materialize(step_id, asked)

    @precondition(lambda self: any(map(self.both.can_come_late, self.both.open)))
    @rule(which=few)
    def materialize_on_another_thread(self, which):
        self.both.materialize_on_another_thread(pick(filter(self.both.can_come_late, self.both.open), which))

    @precondition(lambda self: self.both.open)
    @rule(which=few)
    def discard(self, which):
        self.both.discard(pick(self.both.open, which))

    @precondition(lambda self: self.both.handed)
    @rule(which=few, how=st.sampled_from(["acknowledge", "acknowledge one", "release", "release"]))
    def hand_back(self, which, how):
        self.both.let_late_calls_return()
        handed = pick(self.both.handed, which)
        if how == "release":
            self.both.release(handed)
        else:
            self.both.acknowledge(handed, None if how == "acknowledge" else list(handed.served)[:1])

    # -- now and then

    @rule(
        what=st.sampled_from(
            [
                "hold",
                "hold",
                "hold",
                "flush",
                "flush",
                "take partial",
                "take partial",
                "reset",
                "fail",
                *["new weights"] * 3,
                *["misuse"] * 6,
            ]
        ),
        which=st.integers(0, 41),
    )
    def now_and_then(self, what, which):
        self.both.let_late_calls_return()
        if what == "hold":
            self.both.hold_copies()
        elif what == "flush":
            self.cache.flush()
        elif what == "take partial":
            self.both.take_partial_requests()
        elif what == "reset":
            assert self.both.reset() is None
        elif what == "new weights":
            self.both.bump(pick(NEW_WEIGHTS, which))
        elif what == "fail":
            self.begin([("go_on", 0, 2, 0, 0)])
            if self.engine.plan.runs:
                self.both.fail_a_copy(*self.engine.forward(None, 0))
        else:
            self.cache.flush()
            self.misuse(*divmod(which, 7))

    # -- misuse changes nothing

    def misuse(self, what, which):
        both = self.both
        if what == 0:
            self.use_a_step_that_is_not_open(pick(both.consumed, which))
        elif what in (1, 2) and both.open:
            self.ask_wrongly(pick(both.open, which))
        elif what == 3:
            event = RequestEvent(RequestEventKind.STARTED, "a", (1, NUM_BLOCKS))
            both.assert_refused(SlotOutOfRangeError, self.cache.new_step_starts, StepEvents((event,)))
        elif what == 4 and both.two_phase and both.handed:
            both.assert_refused(RequestNotInStepError, pick(both.handed, which).outputs.acknowledge, ["nobody"])
        else:
            self.save_wrongly(*WRONG_STEPS[which % len(WRONG_STEPS)])

    def use_a_step_that_is_not_open(self, consumed):
        for step_id in {10_000, consumed} - {None}:
            error = self.both.consumed.get(step_id, UnknownStepError)
            self.both.assert_refused(error, self.cache.materialize, step_id, [])
            self.both.assert_refused(error, self.cache.discard_step, step_id)

    def ask_wrongly(self, step_id):
        refused, counts = self.both.assert_refused, self.both.open[step_id]
        refused(RequestNotInStepError, self.cache.materialize, step_id, ["nobody"], counts)
        for req_id in counts:
            for wrong in (-1, MAX_TOKENS):
                refused(DraftCountError, self.cache.materialize, step_id, [], counts | {req_id: wrong})
                refused(DraftCountError, self.cache.discard_step, step_id, counts | {req_id: wrong})
            missing = {other: count for other, count in counts.items() if other != req_id}
            refused(DraftCountMissingError, self.cache.materialize, step_id, [], missing)
            refused(DraftCountMissingError, self.cache.discard_step, step_id)

    def save_wrongly(self, error, changes):
        columns = RIGHT_LAYOUT | changes
        hidden = columns.pop("hidden", torch.zeros(1, 3))
        if self.both.block_size == 1 and error is BlockSizeMismatchError:
            return
        self.both.set_layout(["a"], **columns)
        self.both.assert_refused(error, self.cache.save_outputs, hidden, {}, **ONE_ROW)
        if self.both.model.under_way is None:
            self.both.set_layout(["a"], **RIGHT_LAYOUT)
            self.both.assert_refused(StepOrderError, self.cache.save_outputs, torch.zeros(1, 3), {}, **ONE_ROW)

    # -- always

    @invariant()
    def the_counters_are_right(self):
        if self.both is not None:
            self.both.assert_counters()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(stateful_step_count=30)
