# SPDX-License-Identifier: Apache-2.0
"""What calls cost that belong to no step, and with what that may grow: not with blocks, not with requests at rest."""

import pytest
import torch
from budget_loads import BATCHES, NUM_TOKEN_KEYS
from budget_plain_loads import Decoding
from cache_rig import new
from operation_budgets import (
    BUMP_WEIGHT_VERSION,
    FLUSH_WITH_NOTHING_QUEUED,
    REGISTER_POLICY,
    REGISTER_POLICY_DEFERRING,
    RESET_IDLE,
    RESET_WITH_LIVE_REQUESTS,
    STATS,
    TAKE_PARTIAL_REQUESTS,
)
from operation_costs import Cost, CountedRuntime, assert_costs

from omni_core.prefix_cache.policy import ModelCachePolicy

FEW = (1, 2, 4, 8)
NUM_BLOCKS = (16, 1024, 65536)
CALLS = {
    "flush": (lambda cache: cache.flush(), FLUSH_WITH_NOTHING_QUEUED),
    "take_partial_requests": (lambda cache: cache.take_partial_requests(), TAKE_PARTIAL_REQUESTS.of(0)),
    "stats": (lambda cache: cache.stats(), STATS),
    "bump_weight_version": (lambda cache: cache.bump_weight_version(), BUMP_WEIGHT_VERSION),
}


def cost_of(rig, call):
    with rig.runtime.metered() as meter:
        call(rig.cache)
    return meter.cost


def used_rig(make_rig, num_keys=1, **options):
    """A cache at rest that stores `num_keys` keys."""
    keys = {f"key{i}": ((4,), torch.float32) for i in range(num_keys - 1)}
    rig = make_rig(keys=keys, runtime=CountedRuntime(), **options)
    rig.run(new("A", [1])).release()
    rig.cache.flush()
    return rig


def reset_cost(rig):
    """Of a reset once the only request has ended."""
    rig.begin(finish=["A"])
    return cost_of(rig, lambda cache: cache.reset())


def test_live_requests_do_not_grow_a_call(make_rig):
    rigs = {num_reqs: Decoding(make_rig, num_reqs).rig for num_reqs in BATCHES}
    for call, budget in CALLS.values():
        costs = {num_reqs: cost_of(rig, call) for num_reqs, rig in rigs.items()}
        assert_costs(costs, budget.of(NUM_TOKEN_KEYS))


@pytest.mark.parametrize("name", CALLS)
def test_blocks_do_not_grow_a_call(make_rig, name):
    call, budget = CALLS[name]
    costs = {num_blocks: cost_of(used_rig(make_rig, num_blocks=num_blocks), call) for num_blocks in NUM_BLOCKS}
    assert_costs(costs, budget.of(1))


@pytest.mark.parametrize("name", CALLS)
def test_a_call_grows_with_each_stored_key_as_its_budget_says(make_rig, name):
    call, budget = CALLS[name]
    assert_costs({num_keys: cost_of(used_rig(make_rig, num_keys), call) for num_keys in FEW}, budget)


def test_take_partial_requests_grows_by_the_same_cost_with_each_report(make_rig):
    costs = {}
    for num_reports in FEW:
        rig = make_rig(runtime=CountedRuntime())
        names = [f"r{i}" for i in range(num_reports)]
        rig.cache.discard_step(rig.step(*(new(name, [1 + i]) for i, name in enumerate(names))))
        rig.begin(finish=names)
        costs[num_reports] = cost_of(rig, lambda cache: cache.take_partial_requests())
    assert_costs(costs, TAKE_PARTIAL_REQUESTS)


# -- reset


def test_blocks_do_not_grow_the_reset_of_an_idle_cache(make_rig):
    costs = {num_blocks: reset_cost(used_rig(make_rig, num_blocks=num_blocks)) for num_blocks in NUM_BLOCKS}
    assert_costs(costs, RESET_IDLE.of(1))


def test_the_reset_of_an_idle_cache_grows_by_the_same_cost_with_each_stored_key(make_rig):
    assert_costs({num_keys: reset_cost(used_rig(make_rig, num_keys)) for num_keys in FEW}, RESET_IDLE)


def test_reset_grows_by_the_same_cost_with_each_live_request(make_rig):
    costs = {n: cost_of(Decoding(make_rig, n).rig, lambda cache: cache.reset()) for n in BATCHES}
    assert_costs(costs, RESET_WITH_LIVE_REQUESTS)


# -- register_policy


def registering_cost(make_rig, declaration, num_keys):
    """Without the calls, which depend on the machine."""
    rig = make_rig(runtime=CountedRuntime())
    policy = ModelCachePolicy(**{declaration: frozenset(f"key{i}" for i in range(num_keys))})
    cost = cost_of(rig, lambda cache: cache.register_policy(policy))
    return Cost(cost.torch_ops, cost.locks)


@pytest.mark.parametrize(
    ("declaration", "budget"),
    [
        ("token_keys", REGISTER_POLICY),
        ("request_keys", REGISTER_POLICY),
        ("deferred_keys", REGISTER_POLICY_DEFERRING),
    ],
)
def test_declared_keys_do_not_grow_register_policy(make_rig, declaration, budget):
    costs = {num_keys: registering_cost(make_rig, declaration, num_keys) for num_keys in FEW}
    assert_costs(costs, budget)
