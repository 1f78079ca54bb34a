# SPDX-License-Identifier: Apache-2.0
"""What a step with a deferred key costs the engine thread does not depend on its requests, nor on the budget."""

from contextlib import nullcontext

import omni_core_cpu_sim
import torch
from cache_rig import more, new
from deferred_rig import MEL, MEL_ROW_BYTES, DeferredRig
from operation_counts import WatchedRuntime, calls_made_by, torch_operations

import omni_core
from omni_core.backend.memory import aligned_nbytes

BATCHES = (1, 8, 100)
BUDGET_STEPS = 4
WARM_UP_STEPS = 12
"""Every place of the ring has been used; from here on each step forces one record."""


class Decoding:
    """A batch of requests that gets one token each per step; every step is given up, so that its rows wait."""

    def __init__(self, num_reqs):
        self.runtime = WatchedRuntime()
        self.rig = DeferredRig(
            runtime=self.runtime,
            num_blocks=1 + num_reqs,
            block_size=64,
            max_num_tokens=num_reqs,
            budget_bytes=BUDGET_STEPS * aligned_nbytes(num_reqs * MEL_ROW_BYTES),
        )
        self._outputs = torch.ones(num_reqs, 3), {MEL: torch.ones(num_reqs, 4)}
        self._runs = [new(f"r{i}", [1 + i], run=1) for i in range(num_reqs)]
        self._num_reqs = num_reqs

    def step(self, counter=nullcontext):
        """One step; what `counter` counts in its `save_outputs`."""
        hidden, further = self._outputs
        self.rig.begin(*self._runs)
        copies = self.rig.copies()
        with counter() as counted:
            step = self.rig.cache.save_outputs(
                hidden, further, num_tokens_unpadded=self._num_reqs, num_tokens_padded=self._num_reqs, carry_owed=False
            )
        self.rig.discard(step)
        self.rig.settle()
        self._runs = [more(f"r{i}") for i in range(self._num_reqs)]
        return counted, self.rig.copies() - copies


def engine_cost(num_reqs):
    """torch operations, locks, and calls in Python and in C of `save_outputs` under pressure."""
    decoding = Decoding(num_reqs)
    for _ in range(WARM_UP_STEPS):
        decoding.step()
    backend = decoding.rig.backend
    before = (backend.pinned_allocations, backend.device_allocations)
    counters = (torch_operations, decoding.runtime.locks_taken, lambda: calls_made_by(omni_core, omni_core_cpu_sim))
    (ops, locks, calls), forced = zip(*(decoding.step(counter) for counter in counters), strict=True)
    assert forced == (1, 1, 1), "each step makes room for the next"
    assert ops.new_storages == 0
    assert (backend.pinned_allocations, backend.device_allocations) == before
    decoding.rig.stop()
    return ops.total, len(locks), calls.python, calls.c


def test_a_deferred_step_costs_the_engine_the_same_for_any_number_of_requests():
    costs = {num_reqs: engine_cost(num_reqs) for num_reqs in BATCHES}
    assert costs == dict.fromkeys(BATCHES, costs[1])
    assert costs[1][:2] == (2, 4), "two clones; one lock more than a step without deferred rows, for its place"
