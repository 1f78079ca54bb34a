# SPDX-License-Identifier: Apache-2.0
"""What a step costs in things that do not depend on the machine: torch operations, memory, locks and calls."""

import gc
import tracemalloc
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import omni_core_cpu_sim
import pytest
import torch
from cache_rig import more, new
from operation_counts import WatchedRuntime, calls_made_by, torch_operations

import omni_core
from omni_core.prefix_cache.policy import ModelCachePolicy


@dataclass(frozen=True)
class Cost:
    """Of one call of the cache, on the thread that makes it."""

    torch_ops: int
    locks: int
    python_calls: int
    """Of Python functions, by the code of omni_core and of the cpu_sim backend; a lock is two of them."""
    c_calls: int
    """Of functions written in C, by the same code."""


# The budget of a step with hidden rows and one further key, for any number of requests and tokens. Lower a number when
# the code gets cheaper. Raising one is a decision: it makes every step of every engine slower, so say why in the commit.
NEW_STEP_STARTS = Cost(torch_ops=0, locks=2, python_calls=17, c_calls=5)
SAVE_OUTPUTS = Cost(torch_ops=2, locks=5, python_calls=141, c_calls=63)
# The same with a layout that the staging slot has not carved before, and one request that ends while another starts.
NEW_STEP_STARTS_OF_A_PREFILL = Cost(torch_ops=0, locks=2, python_calls=17, c_calls=5)
SAVE_OUTPUTS_OF_A_PREFILL = Cost(torch_ops=8, locks=5, python_calls=141, c_calls=63)
# `materialize` runs on the consumer's thread. Each request costs a view per key, and what describes its rows.
MATERIALIZE = Cost(torch_ops=10, locks=5, python_calls=77, c_calls=47)
MATERIALIZE_PER_REQUEST = Cost(torch_ops=2, locks=0, python_calls=21, c_calls=5)

BATCHES = (1, 8, 64, 256)
PROMPTS = (2, 40, 1000)
WARM_UP_STEPS = 6
"""Every staging slot has been used once."""
BLOCK_SIZE = 16
BLOCKS_PER_REQUEST = 4
HIDDEN_SIZE = 2048
CODES_WIDTH = 16


@pytest.fixture
def make_budget_rig(make_rig):
    def make(num_reqs, **options):
        return make_rig(
            hidden=HIDDEN_SIZE,
            dtype=torch.bfloat16,
            keys={"codes": ((CODES_WIDTH,), torch.float32)},
            policy=ModelCachePolicy(token_keys=frozenset({"codes"})),
            num_blocks=1 + max(num_reqs * BLOCKS_PER_REQUEST, 2 * max(PROMPTS) // BLOCK_SIZE),
            block_size=BLOCK_SIZE,
            max_num_tokens=1024,
            **options,
        )

    return make


def outputs(num_tokens):
    return torch.ones(num_tokens, HIDDEN_SIZE, dtype=torch.bfloat16), {"codes": torch.ones(num_tokens, CODES_WIDTH)}


class Decoding:
    """A batch of requests that gets one token each per step."""

    def __init__(self, rig, num_reqs):
        self.rig = rig
        self.num_reqs = num_reqs
        self._outputs = outputs(num_reqs)
        self._runs = [
            new(f"r{i}", range(1 + i * BLOCKS_PER_REQUEST, 1 + (i + 1) * BLOCKS_PER_REQUEST), run=1)
            for i in range(num_reqs)
        ]
        for _ in range(WARM_UP_STEPS):
            self.step(nullcontext)

    def step(self, counter):
        """One step; what `counter` counts in each of its three calls."""
        counts = counted_step(self.rig, counter, self._runs, (), self._outputs)
        self._runs = [more(run.req_id) for run in self._runs]
        return counts


class Prefilling:
    """Steps in which one request ends and another brings its whole prompt, each a token longer than the one before."""

    def __init__(self, rig, num_tokens):
        self.rig = rig
        self._num_tokens = num_tokens
        self._prompts = 0
        for _ in range(WARM_UP_STEPS):
            self.step(nullcontext)

    def step(self, counter):
        finish = [f"r{self._prompts - 1}"] if self._prompts else []
        num_tokens = self._num_tokens + self._prompts
        runs = [new(f"r{self._prompts}", range(1, 2 + num_tokens // BLOCK_SIZE), run=num_tokens)]
        self._prompts += 1
        return counted_step(self.rig, counter, runs, finish, outputs(num_tokens))


def counted_step(rig, counter, runs, finish, step_outputs):
    hidden, further = step_outputs
    with counter() as starting:
        rig.begin(*runs, finish=finish)
    with counter() as saving:
        step_id = rig.save(further, hidden=hidden, keys=())
    rig.cache.flush()
    with counter() as taking:
        taken = rig.take(step_id)
    assert len(taken) == len(runs)
    taken.release()
    return starting, saving, taking


def costs(workload, runtime):
    """What `new_step_starts`, `save_outputs` and `materialize` cost, from three equal steps."""
    torch_counts = workload.step(torch_operations)
    locks = workload.step(runtime.locks_taken)
    calls = workload.step(lambda: calls_made_by(omni_core, omni_core_cpu_sim))
    return tuple(
        Cost(ops.total, len(taken), call.python, call.c)
        for ops, taken, call in zip(torch_counts, locks, calls, strict=True)
    )


@pytest.mark.parametrize("num_reqs", BATCHES)
def test_a_decode_step_costs_the_engine_the_same_for_any_number_of_requests(make_budget_rig, num_reqs):
    runtime = WatchedRuntime()
    starting, saving, _ = costs(Decoding(make_budget_rig(num_reqs, runtime=runtime), num_reqs), runtime)
    assert starting == NEW_STEP_STARTS
    assert saving == SAVE_OUTPUTS


@pytest.mark.parametrize("num_tokens", PROMPTS)
def test_a_prefill_step_costs_the_engine_the_same_for_any_number_of_tokens(make_budget_rig, num_tokens):
    runtime = WatchedRuntime()
    starting, saving, _ = costs(Prefilling(make_budget_rig(1, runtime=runtime), num_tokens), runtime)
    assert starting == NEW_STEP_STARTS_OF_A_PREFILL
    assert saving == SAVE_OUTPUTS_OF_A_PREFILL


@pytest.mark.parametrize("num_reqs", BATCHES)
def test_materialize_of_a_decode_step_costs_a_view_per_request_and_key(make_budget_rig, num_reqs):
    runtime = WatchedRuntime()
    *_, taking = costs(Decoding(make_budget_rig(num_reqs, runtime=runtime), num_reqs), runtime)
    assert taking == Cost(
        MATERIALIZE.torch_ops + num_reqs * MATERIALIZE_PER_REQUEST.torch_ops,
        MATERIALIZE.locks + num_reqs * MATERIALIZE_PER_REQUEST.locks,
        MATERIALIZE.python_calls + num_reqs * MATERIALIZE_PER_REQUEST.python_calls,
        MATERIALIZE.c_calls + num_reqs * MATERIALIZE_PER_REQUEST.c_calls,
    )


@pytest.mark.parametrize("workload", [Decoding, Prefilling])
def test_a_step_allocates_no_tensor_no_arena_and_no_snapshot_buffer(make_budget_rig, workload):
    rig = make_budget_rig(8)
    working = workload(rig, 8)
    before = (rig.backend.pinned_allocations, rig.backend.device_allocations)
    for counts in (working.step(torch_operations) for _ in range(WARM_UP_STEPS)):
        assert [count.new_storages for count in counts] == [0, 0, 0]
    assert (rig.backend.pinned_allocations, rig.backend.device_allocations) == before


def test_many_steps_leave_no_memory_behind(make_budget_rig):
    prefilling = Prefilling(make_budget_rig(1), 16)
    for _ in range(100):
        prefilling.step(nullcontext)
    tracemalloc.start()
    try:
        kept = []
        for _ in range(2):
            for _ in range(200):
                prefilling.step(nullcontext)
            gc.collect()
            kept.append(cache_bytes(tracemalloc.take_snapshot()))
    finally:
        tracemalloc.stop()
    print(kept)
    assert kept[1] - kept[0] < 200


def cache_bytes(snapshot):
    """Bytes allocated by lines of the cache and the simulator."""
    ours = [tracemalloc.Filter(True, str(Path(package.__path__[0]) / "*")) for package in (omni_core, omni_core_cpu_sim)]
    return sum(trace.size for trace in snapshot.filter_traces(ours).traces)
