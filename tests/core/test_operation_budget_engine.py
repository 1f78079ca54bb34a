# SPDX-License-Identifier: Apache-2.0
"""What a step costs the engine thread, and with what that may grow: with a step's news, never with its tokens."""

import pytest
from budget_deferred_loads import DeferringUnderPressure, DeferringWithRoom, FinishingDeferred
from budget_loads import BATCHES, step_costs
from budget_plain_loads import (
    Carrying,
    Decoding,
    Drafting,
    Extending,
    Finishing,
    Hitting,
    PassingOn,
    PassingOnLists,
    Prefilling,
)
from operation_budgets import (
    NEW_STEP_STARTS,
    NEW_STEP_STARTS_EXTENDING,
    NEW_STEP_STARTS_FINISHING,
    NEW_STEP_STARTS_FINISHING_DEFERRED,
    NEW_STEP_STARTS_OF_A_PREFILL,
    NEW_STEP_STARTS_WITH_HITS,
    SAVE_OUTPUTS,
    SAVE_OUTPUTS_CARRYING,
    SAVE_OUTPUTS_DEFERRING,
    SAVE_OUTPUTS_FINISHING,
    SAVE_OUTPUTS_OF_A_PREFILL,
    SAVE_OUTPUTS_PASSING_LISTS_ON,
    SAVE_OUTPUTS_PASSING_ON,
    SAVE_OUTPUTS_UNDER_PRESSURE,
    SAVE_OUTPUTS_WITH_DRAFTS,
    SAVE_OUTPUTS_WITH_HITS,
)
from operation_costs import assert_costs

PROMPTS = (2, 40, 1000)
HITS = (16, 160, 960)
FEW = (1, 2, 4, 8)
SEVERAL = (8, 64, 256)


def assert_engine(load, sizes, starting, saving):
    """One step of `load(size)` costs the engine thread what the budgets of its two calls say, for every size."""
    costs = step_costs(load, sizes)
    assert_costs(costs.starting, starting)
    assert_costs(costs.saving, saving)


# -- grows with nothing


def test_decode_requests_do_not_grow_a_step(make_rig):
    assert_engine(lambda num_reqs: Decoding(make_rig, num_reqs), BATCHES, NEW_STEP_STARTS, SAVE_OUTPUTS)


def test_prompt_tokens_do_not_grow_a_step(make_rig):
    assert_engine(
        lambda num_tokens: Prefilling(make_rig, num_tokens),
        PROMPTS,
        NEW_STEP_STARTS_OF_A_PREFILL,
        SAVE_OUTPUTS_OF_A_PREFILL,
    )


def test_tokens_of_a_hit_do_not_grow_a_step(make_rig):
    assert_engine(lambda hit: Hitting(make_rig, hit), HITS, NEW_STEP_STARTS_WITH_HITS.of(1), SAVE_OUTPUTS_WITH_HITS)


def test_requests_with_drafts_do_not_grow_a_step(make_rig):
    assert_engine(lambda num_reqs: Drafting(make_rig, num_reqs), BATCHES, NEW_STEP_STARTS, SAVE_OUTPUTS_WITH_DRAFTS)


def test_drafts_of_a_request_do_not_grow_a_step(make_rig):
    assert_engine(
        lambda drafts: Drafting(make_rig, 8, num_drafts=drafts), FEW, NEW_STEP_STARTS, SAVE_OUTPUTS_WITH_DRAFTS
    )


def test_requests_that_stay_do_not_grow_a_step_in_which_one_ends(make_rig):
    assert_engine(
        lambda num_reqs: Finishing(make_rig, num_reqs), BATCHES, NEW_STEP_STARTS_FINISHING, SAVE_OUTPUTS_FINISHING
    )


def test_tokens_of_a_request_do_not_grow_the_step_in_which_it_ends(make_rig):
    assert_engine(
        lambda tokens: Finishing(make_rig, 8, num_tokens=tokens),
        (1, 17, 100),
        NEW_STEP_STARTS_FINISHING,
        SAVE_OUTPUTS_FINISHING,
    )


def test_blocks_a_request_gets_do_not_grow_a_step(make_rig):
    assert_engine(
        lambda blocks: Extending(make_rig, 2, num_new_blocks=blocks),
        (1, 2, 4),
        NEW_STEP_STARTS_EXTENDING.of(2),
        SAVE_OUTPUTS,
    )


def test_entries_of_a_tensor_that_is_passed_on_do_not_grow_a_step(make_rig):
    assert_engine(lambda num_reqs: PassingOn(make_rig, num_reqs), BATCHES, NEW_STEP_STARTS, SAVE_OUTPUTS_PASSING_ON)


def test_requests_do_not_grow_a_deferred_step_while_there_is_room(make_rig):
    assert_engine(
        lambda num_reqs: DeferringWithRoom(make_rig, num_reqs), BATCHES, NEW_STEP_STARTS, SAVE_OUTPUTS_DEFERRING
    )


def test_requests_do_not_grow_a_deferred_step_under_pressure(make_rig):
    costs = {}
    for num_reqs in BATCHES:
        load = DeferringUnderPressure(make_rig, num_reqs)
        costs[num_reqs] = load.step().saving.cost
        assert load.forced == 1, "each step makes room for the next"
    assert_costs(costs, SAVE_OUTPUTS_UNDER_PRESSURE)


def test_requests_that_stay_do_not_grow_the_step_in_which_a_deferred_one_ends(make_rig):
    costs = {num_reqs: FinishingDeferred(make_rig, num_reqs).step().starting.cost for num_reqs in BATCHES}
    assert_costs(costs, NEW_STEP_STARTS_FINISHING_DEFERRED.of(1))


# -- grows with a step's news


def test_a_step_grows_by_the_same_cost_with_each_request_that_hits(make_rig):
    assert_engine(
        lambda num_reqs: Hitting(make_rig, 160, num_reqs), FEW, NEW_STEP_STARTS_WITH_HITS, SAVE_OUTPUTS_WITH_HITS
    )


def test_a_step_grows_by_the_same_cost_with_each_request_that_gets_blocks(make_rig):
    """One in 16 of the batch; the others add nothing."""
    assert_engine(lambda extended: Extending(make_rig, extended), (1, 4, 16), NEW_STEP_STARTS_EXTENDING, SAVE_OUTPUTS)


def test_a_step_grows_by_the_same_cost_with_each_request_it_carries_owed_rows_of(make_rig):
    assert_engine(lambda owed: Carrying(make_rig, owed), FEW, NEW_STEP_STARTS, SAVE_OUTPUTS_CARRYING)


def test_requests_owed_nothing_do_not_grow_a_step_that_carries_owed_rows(make_rig):
    assert_engine(
        lambda others: Carrying(make_rig, 1, num_others=others),
        (1, 8, 64),
        NEW_STEP_STARTS,
        SAVE_OUTPUTS_CARRYING.of(1),
    )


def test_a_step_grows_by_the_same_cost_with_each_tensor_of_a_list_that_is_passed_on(make_rig):
    """A list is the one output whose parts cannot be told without looking at each."""
    assert_engine(
        lambda num_reqs: PassingOnLists(make_rig, num_reqs), SEVERAL, NEW_STEP_STARTS, SAVE_OUTPUTS_PASSING_LISTS_ON
    )


@pytest.mark.parametrize("num_reqs", [1, 64])
def test_the_end_of_a_deferred_request_grows_by_the_same_calls_with_each_record_it_forces(make_rig, num_reqs):
    costs = {
        num_waiting: FinishingDeferred(make_rig, num_reqs, num_waiting).step().starting.cost for num_waiting in FEW
    }
    assert_costs(costs, NEW_STEP_STARTS_FINISHING_DEFERRED)
