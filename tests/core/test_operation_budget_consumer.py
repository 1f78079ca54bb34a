# SPDX-License-Identifier: Apache-2.0
"""What it costs to consume a step, on whichever thread does it, and with what that may grow: never with tokens."""

from budget_deferred_loads import DeferringWithRoom
from budget_loads import BATCHES, step_costs
from budget_plain_loads import (
    Carrying,
    Decoding,
    Drafting,
    Hitting,
    LeavingOut,
    PassingOn,
    PassingOnLists,
    Prefilling,
)
from operation_budgets import (
    ACKNOWLEDGE,
    ACKNOWLEDGE_TWO_PHASE,
    DISCARD_STEP,
    FIRST_LOOK,
    MATERIALIZE,
    MATERIALIZE_CARRYING,
    MATERIALIZE_DEFERRED,
    MATERIALIZE_LEAVING_OUT,
    MATERIALIZE_LEAVING_SOME_OUT,
    MATERIALIZE_LISTS_PASSED_ON,
    MATERIALIZE_PASSED_ON,
    MATERIALIZE_TWO_PHASE,
    MATERIALIZE_WITH_DRAFTS,
    MATERIALIZE_WITH_HITS,
    RELEASE,
    RELEASE_TWO_PHASE,
)
from operation_costs import assert_costs

from omni_core.prefix_cache.config import Delivery

FEW = (1, 2, 4, 8)
SEVERAL = (8, 64, 256)
PROMPTS = (40, 400, 1000)
HITS = (16, 160, 960)


# -- a step of which every row is delivered


def test_requests_do_not_grow_materialize_nor_release(make_rig):
    costs = step_costs(lambda num_reqs: Decoding(make_rig, num_reqs), BATCHES)
    assert_costs(costs.taking, MATERIALIZE)
    assert_costs(costs.acknowledging, ACKNOWLEDGE)
    assert_costs(costs.releasing, RELEASE)


def test_the_first_look_grows_by_the_same_cost_with_each_request(make_rig):
    costs = step_costs(lambda num_reqs: Decoding(make_rig, num_reqs), BATCHES)
    assert_costs(costs.looking, FIRST_LOOK)


def test_tokens_do_not_grow_materialize_nor_the_first_look(make_rig):
    """Prompts of one length again and again: the second step of a form finds what the first made."""
    costs = step_costs(lambda tokens: Prefilling(make_rig, tokens, growth=0), PROMPTS)
    assert_costs(costs.taking, MATERIALIZE)
    assert_costs(costs.looking, FIRST_LOOK.of(1))


def test_requests_do_not_grow_materialize_of_a_deferred_step(make_rig):
    costs = step_costs(lambda num_reqs: DeferringWithRoom(make_rig, num_reqs), BATCHES)
    assert_costs(costs.taking, MATERIALIZE_DEFERRED)


# -- a step whose rows are joined request by request


def test_materialize_grows_by_the_same_cost_with_each_request_that_hits(make_rig):
    costs = step_costs(lambda num_reqs: Hitting(make_rig, 160, num_reqs), FEW)
    assert_costs(costs.taking, MATERIALIZE_WITH_HITS)


def test_tokens_of_a_hit_do_not_grow_materialize(make_rig):
    costs = step_costs(lambda hit: Hitting(make_rig, hit), HITS)
    assert_costs(costs.taking, MATERIALIZE_WITH_HITS.of(1))


def test_materialize_grows_by_the_same_cost_with_each_request_with_drafts(make_rig):
    costs = step_costs(lambda num_reqs: Drafting(make_rig, num_reqs), BATCHES)
    assert_costs(costs.taking, MATERIALIZE_WITH_DRAFTS)


def test_accepted_drafts_do_not_grow_materialize(make_rig):
    costs = step_costs(lambda drafts: Drafting(make_rig, 64, num_drafts=drafts), (2, 3, 4))
    assert_costs(costs.taking, MATERIALIZE_WITH_DRAFTS.of(64))


def test_materialize_grows_by_the_same_cost_with_each_entry_that_was_passed_on(make_rig):
    costs = step_costs(lambda num_reqs: PassingOn(make_rig, num_reqs), BATCHES)
    assert_costs(costs.taking, MATERIALIZE_PASSED_ON)


def test_materialize_grows_by_the_same_cost_with_each_element_that_was_passed_on(make_rig):
    costs = step_costs(lambda num_reqs: PassingOnLists(make_rig, num_reqs), BATCHES)
    assert_costs(costs.taking, MATERIALIZE_LISTS_PASSED_ON)


def test_materialize_grows_by_the_same_cost_with_each_request_asked_for_beside_one_that_is_not(make_rig):
    costs = step_costs(lambda num_asked: LeavingOut(make_rig, num_asked), SEVERAL)
    assert_costs(costs.taking, MATERIALIZE_LEAVING_OUT)


def test_materialize_grows_by_the_same_cost_with_each_request_not_asked_for(make_rig):
    costs = step_costs(lambda num_left_out: LeavingOut(make_rig, 8, num_left_out), FEW)
    assert_costs(costs.taking, MATERIALIZE_LEAVING_SOME_OUT)


def test_materialize_grows_by_the_same_cost_with_each_request_that_gets_owed_rows(make_rig):
    costs = step_costs(lambda num_owed: Carrying(make_rig, num_owed), FEW)
    assert_costs(costs.taking, MATERIALIZE_CARRYING)


# -- two-phase delivery


def test_two_phase_delivery_grows_materialize_and_acknowledge_by_the_same_cost_with_each_request(make_rig):
    costs = step_costs(lambda num_reqs: Decoding(make_rig, num_reqs, delivery=Delivery.TWO_PHASE), BATCHES)
    assert_costs(costs.taking, MATERIALIZE_TWO_PHASE)
    assert_costs(costs.acknowledging, ACKNOWLEDGE_TWO_PHASE)
    assert_costs(costs.releasing, RELEASE_TWO_PHASE)


def test_tokens_do_not_grow_two_phase_delivery(make_rig):
    costs = step_costs(lambda tokens: Prefilling(make_rig, tokens, growth=0, delivery=Delivery.TWO_PHASE), PROMPTS)
    assert_costs(costs.taking, MATERIALIZE_TWO_PHASE.of(1))
    assert_costs(costs.acknowledging, ACKNOWLEDGE_TWO_PHASE.of(1))


# -- a step nobody wants


def discard_cost(load):
    saved = load.save(load.runs())
    load.settle()
    with load.runtime.metered() as discarding:
        load.rig.cache.discard_step(saved.step_id)
    return discarding.cost


def test_discard_step_grows_by_the_same_cost_with_each_request(make_rig):
    assert_costs({num_reqs: discard_cost(Decoding(make_rig, num_reqs)) for num_reqs in BATCHES}, DISCARD_STEP)
