# SPDX-License-Identifier: Apache-2.0
"""What a step costs the committer and the prefetch thread: the committer the same whatever the step has."""

import pytest
from budget_deferred_loads import DeferringWithRoom, Waiting
from budget_loads import BATCHES, COMMITTER, PREFETCH
from budget_plain_loads import Decoding, Drafting, Hitting, Prefilling
from cache_rig import more
from operation_budgets import (
    COMMITTER_LANDING,
    COMMITTER_LANDING_DEFERRED,
    COMMITTER_LANDING_NEW_FORM,
    COMMITTER_LANDING_RECORDS,
    PREFETCH_OF_HITS,
)
from operation_costs import NOTHING, assert_costs
from operation_counts import no_garbage_collection

FEW = (1, 2, 4, 8)
PROMPTS = (2, 40, 1000)
HITS = (16, 160, 960)


def spent_while(load, thread, act):
    """What the helper of that name costs from asleep to asleep again, while the test does `act`."""

    def spent():
        load.rig.cache.flush()
        load.runtime.wait_until_waiting(thread)
        load.rig.cache.stats()  # takes the lock, which the helper lets go of when it really sleeps
        return load.runtime.spent_by(thread)

    with no_garbage_collection():
        before = spent()
        act()
        return spent() - before


def assert_helper(thread, load, sizes, budget):
    costs = {}
    for size in sizes:
        made = load(size)
        costs[size] = spent_while(made, thread, made.step)
    assert_costs(costs, budget)


# -- the committer


def test_requests_do_not_grow_the_landing_of_a_step(make_rig):
    assert_helper(COMMITTER, lambda num_reqs: Decoding(make_rig, num_reqs), BATCHES, COMMITTER_LANDING)


def test_tokens_do_not_grow_the_landing_of_a_step(make_rig):
    assert_helper(COMMITTER, lambda num_tokens: Prefilling(make_rig, num_tokens), PROMPTS, COMMITTER_LANDING_NEW_FORM)


def test_drafts_do_not_grow_the_landing_of_a_step(make_rig):
    assert_helper(COMMITTER, lambda drafts: Drafting(make_rig, 8, num_drafts=drafts), FEW, COMMITTER_LANDING)


def test_reads_of_other_rows_do_not_grow_the_landing_of_a_step(make_rig):
    assert_helper(COMMITTER, lambda num_reqs: Hitting(make_rig, 160, num_reqs), FEW, COMMITTER_LANDING)


def test_requests_do_not_grow_the_landing_of_a_deferred_step(make_rig):
    assert_helper(COMMITTER, lambda n: DeferringWithRoom(make_rig, n), BATCHES, COMMITTER_LANDING_DEFERRED)


@pytest.mark.parametrize("num_reqs", [1, 64])
def test_landing_grows_by_the_same_cost_with_each_waiting_record(make_rig, num_reqs):
    costs = {}
    for num_waiting in FEW:
        load = Waiting(make_rig, num_reqs)
        for _ in range(num_waiting):
            load.keep_waiting([more(name) for name in load.names])
        before = load.runtime.spent_by(COMMITTER)
        with no_garbage_collection():
            load.rig.cache.flush()
            load.runtime.wait_until_waiting(COMMITTER)
            load.rig.cache.stats()
            costs[num_waiting] = load.runtime.spent_by(COMMITTER) - before
    assert_costs(costs, COMMITTER_LANDING_RECORDS)


# -- the prefetch thread


def test_a_step_without_a_hit_costs_the_prefetch_thread_nothing(make_rig):
    load = Decoding(make_rig, 8)
    assert spent_while(load, PREFETCH, load.step) == NOTHING


def test_tokens_of_a_hit_do_not_grow_its_gathering(make_rig):
    assert_helper(PREFETCH, lambda hit: Hitting(make_rig, hit), HITS, PREFETCH_OF_HITS.of(1))


def test_gathering_grows_by_the_same_cost_with_each_request_that_hits(make_rig):
    assert_helper(PREFETCH, lambda num_reqs: Hitting(make_rig, 160, num_reqs), FEW, PREFETCH_OF_HITS)
