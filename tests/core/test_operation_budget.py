# SPDX-License-Identifier: Apache-2.0
"""What a step costs in things that do not depend on the machine: torch operations, memory, locks and calls."""

import gc
import sys
import tracemalloc
from contextlib import nullcontext
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import omni_core_cpu_sim
import pytest
import torch
from cache_rig import more, new
from operation_counts import WatchedRuntime, calls_made_by, torch_operations

import omni_core
from omni_core.backend.memory import tensor_nbytes
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

    def __add__(self, other):
        return Cost(*(mine + its for mine, its in zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, times):
        return Cost(*(mine * times for mine in astuple(self)))


# The budget of a step with hidden rows and one further key, for any number of requests and tokens. Lower a number when
# the code gets cheaper. Raising one is a decision, because it makes every step of every engine slower: say why in the
# commit.
NEW_STEP_STARTS = Cost(torch_ops=0, locks=1, python_calls=10, c_calls=1)
SAVE_OUTPUTS = Cost(torch_ops=2, locks=3, python_calls=83, c_calls=34)
# One request ends, another brings its whole prompt; the form of the step and the views of the staging page are new.
NEW_STEP_STARTS_OF_A_PREFILL = Cost(torch_ops=0, locks=1, python_calls=52, c_calls=46)
SAVE_OUTPUTS_OF_A_PREFILL = Cost(torch_ops=8, locks=3, python_calls=168, c_calls=103)
# One request ends, another hits stored rows and computes one.
NEW_STEP_STARTS_WITH_A_HIT = Cost(torch_ops=0, locks=1, python_calls=78, c_calls=69)
SAVE_OUTPUTS_WITH_A_HIT = Cost(torch_ops=2, locks=3, python_calls=92, c_calls=49)
# On the consumer's thread, for any number of requests: one copy per key. What describes a request's rows is made when
# the first is looked at, with one operation per key.
MATERIALIZE = Cost(torch_ops=2, locks=4, python_calls=69, c_calls=32)
FIRST_LOOK = Cost(torch_ops=2, locks=0, python_calls=5, c_calls=6)
FIRST_LOOK_PER_REQUEST = Cost(torch_ops=0, locks=0, python_calls=1, c_calls=0)
TABLE_PYTHON = (3, 11)
"""Interpreters differ in the calls they show a profiler. The table's calls are exact on this one; on others the tests
still demand that they do not grow."""

BATCHES = (1, 8, 64, 256)
PROMPTS = (2, 40, 1000)
HITS = (16, 160, 960)
MANY_STEPS = 200
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
    """Steps in which one request ends and another brings its whole prompt, `growth` tokens longer than the last."""

    def __init__(self, rig, num_tokens, growth=1):
        self.rig = rig
        self._num_tokens = num_tokens
        self._growth = growth
        self._prompts = 0
        for _ in range(WARM_UP_STEPS):
            self.step(nullcontext)

    def step(self, counter):
        finish = [f"r{self._prompts - 1}"] if self._prompts else []
        runs = [new(f"r{self._prompts}", range(1, 2 + self._num_tokens // BLOCK_SIZE), run=self._num_tokens)]
        counts = counted_step(self.rig, counter, runs, finish, outputs(self._num_tokens))
        self._num_tokens += self._growth
        self._prompts += 1
        return counts


class Hitting:
    """Steps in which one request ends and another hits `hit` stored tokens and computes one."""

    def __init__(self, rig, hit):
        self.rig = rig
        self._hit = hit
        self._stored = range(1, 1 + hit // BLOCK_SIZE)
        self._requests = 0
        counted_step(rig, nullcontext, [new("r0", self._stored, run=hit)], (), outputs(hit))
        for _ in range(WARM_UP_STEPS):
            self.step(nullcontext)

    def step(self, counter):
        finish = [f"r{self._requests}"]
        self._requests += 1
        runs = [new(f"r{self._requests}", (*self._stored, self._stored.stop), hit=self._hit, run=1)]
        return counted_step(self.rig, counter, runs, finish, outputs(1))


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
    with counter() as looking:
        taken[runs[-1].req_id]
    taken.release()
    return starting, saving, taking, looking


def costs(workload, runtime):
    """What `new_step_starts`, `save_outputs`, `materialize` and the first look cost, from three equal steps."""
    torch_counts = workload.step(torch_operations)
    locks = workload.step(runtime.locks_taken)
    calls = workload.step(lambda: calls_made_by(omni_core, omni_core_cpu_sim))
    return tuple(
        Cost(ops.total, len(taken), call.python, call.c)
        for ops, taken, call in zip(torch_counts, locks, calls, strict=True)
    )


def assert_exactly(cost, budget):
    if sys.version_info[:2] != TABLE_PYTHON:
        cost = replace(cost, python_calls=budget.python_calls, c_calls=budget.c_calls)
    assert cost == budget


@pytest.fixture
def costs_of(make_budget_rig):
    """The costs of a workload, by its size."""

    def measure(workload, sizes):
        measured = {}
        for size in sizes:
            runtime = WatchedRuntime()
            measured[size] = costs(workload(make_budget_rig(size, runtime=runtime), size), runtime)
        return measured

    return measure


def test_a_decode_step_costs_the_engine_the_same_for_any_number_of_requests(costs_of):
    of_engine = {size: (starting, saving) for size, (starting, saving, *_) in costs_of(Decoding, BATCHES).items()}
    assert of_engine == dict.fromkeys(BATCHES, of_engine[1])
    assert_exactly(of_engine[1][0], NEW_STEP_STARTS)
    assert_exactly(of_engine[1][1], SAVE_OUTPUTS)


def test_a_prefill_step_costs_the_engine_the_same_for_any_number_of_tokens(costs_of):
    of_engine = {size: (starting, saving) for size, (starting, saving, *_) in costs_of(Prefilling, PROMPTS).items()}
    assert of_engine == dict.fromkeys(PROMPTS, of_engine[2])
    assert_exactly(of_engine[2][0], NEW_STEP_STARTS_OF_A_PREFILL)
    assert_exactly(of_engine[2][1], SAVE_OUTPUTS_OF_A_PREFILL)


def test_a_hit_costs_the_engine_the_same_for_any_length(costs_of):
    of_engine = {size: (starting, saving) for size, (starting, saving, *_) in costs_of(Hitting, HITS).items()}
    assert of_engine == dict.fromkeys(HITS, of_engine[16])
    assert_exactly(of_engine[16][0], NEW_STEP_STARTS_WITH_A_HIT)
    assert_exactly(of_engine[16][1], SAVE_OUTPUTS_WITH_A_HIT)


def test_materialize_costs_the_same_for_any_number_of_requests(costs_of):
    taking = {size: cost for size, (_, _, cost, _) in costs_of(Decoding, BATCHES).items()}
    assert taking == dict.fromkeys(BATCHES, taking[1])
    assert_exactly(taking[1], MATERIALIZE)


def test_the_first_look_grows_by_the_same_cost_with_each_request(costs_of):
    looking = {size: cost for size, (_, _, _, cost) in costs_of(Decoding, BATCHES).items()}
    per_request = Cost(*((many - one) // 7 for many, one in zip(astuple(looking[8]), astuple(looking[1]), strict=True)))
    assert looking == {size: looking[1] + per_request * (size - 1) for size in BATCHES}
    assert_exactly(per_request, FIRST_LOOK_PER_REQUEST)
    assert_exactly(looking[1], FIRST_LOOK + FIRST_LOOK_PER_REQUEST)


@pytest.mark.parametrize("workload", [Decoding, Prefilling, Hitting])
def test_the_engine_allocates_no_tensor_no_arena_and_no_snapshot_buffer(make_budget_rig, workload):
    rig = make_budget_rig(16)
    working = workload(rig, 16)
    before = (rig.backend.pinned_allocations, rig.backend.device_allocations)
    for _ in range(WARM_UP_STEPS):
        starting, saving, *_ = working.step(torch_operations)
        assert (starting.new_storages, saving.new_storages) == (0, 0)
    assert (rig.backend.pinned_allocations, rig.backend.device_allocations) == before


def test_materialize_reuses_what_was_released(make_budget_rig):
    decoding = Decoding(make_budget_rig(16), 16)
    for _ in range(WARM_UP_STEPS):
        _, _, taking, _ = decoding.step(torch_operations)
        assert taking.new_storages == 0


def test_many_steps_leave_no_memory_behind(make_budget_rig):
    prefilling = Prefilling(make_budget_rig(1), 16, growth=0)
    kept_bytes = []
    tracemalloc.start()
    try:
        for _ in range(3):
            for _ in range(MANY_STEPS):
                prefilling.step(nullcontext)
            gc.collect()
            kept_bytes.append(cache_bytes(tracemalloc.take_snapshot()))
    finally:
        tracemalloc.stop()
    assert kept_bytes[2] - kept_bytes[1] < MANY_STEPS


def cache_bytes(snapshot):
    """Bytes allocated by lines of the cache and the simulator."""
    ours = [
        tracemalloc.Filter(True, str(Path(package.__path__[0]) / "*")) for package in (omni_core, omni_core_cpu_sim)
    ]
    return sum(trace.size for trace in snapshot.filter_traces(ours).traces)


@pytest.mark.parametrize("workload", [Decoding, Prefilling, Hitting])
def test_no_thread_computes_waits_or_takes_a_lock_while_it_holds_one(make_budget_rig, workload):
    runtime = WatchedRuntime()
    with runtime.watched():
        rig = make_budget_rig(16, runtime=runtime)
        working = workload(rig, 16)
        for _ in range(WARM_UP_STEPS):
            working.step(nullcontext)
        rig.cache.stats()
        rig.cache.reset()
    assert runtime.breaches == []


def test_the_watch_notices_what_is_done_under_a_lock():
    runtime = WatchedRuntime()
    outer, inner = runtime.lock("outer"), runtime.lock("inner")
    condition = runtime.condition(inner, "condition")
    with runtime.watched():
        torch.zeros(1)
        with inner:
            condition.wait_for(lambda: False, 0.001)
        assert runtime.breaches == []
        with outer:
            torch.zeros(1)
            with inner:
                condition.wait_for(lambda: False, 0.001)
    done = [breach.partition(": ")[2] for breach in runtime.breaches]
    assert done == [
        "aten.zeros.default while holding outer",
        "takes lock 'inner' while holding outer",
        "waits for 'condition' while holding outer",
    ]


def test_torch_counts_tell_memory_of_its_own_from_views_and_copies():
    source, target = torch.zeros(4), torch.zeros(4)
    with torch_operations() as counted:
        target.copy_(source)
        source[:2].view(2, 1)
    assert (counted.total, counted.new_storages) == (3, 0)
    with torch_operations() as counted:
        source.clone()
    assert (counted.total, counted.new_storages) == (1, 1)


def test_calls_are_counted_where_our_code_makes_them():
    with calls_made_by(omni_core) as counted:
        len(())
    assert (counted.python, counted.c) == (0, 0)
    with calls_made_by(omni_core) as counted:
        tensor_nbytes((2, 3), torch.int8)
    assert (counted.python, counted.c) == (1, 1), "itself, and `math.prod` in it"
