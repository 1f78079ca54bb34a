# SPDX-License-Identifier: Apache-2.0
"""What every load of the operation budgets shares: its rig, and a step counted call by call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import NamedTuple

import torch
from operation_costs import Cost, CountedRuntime, Meter
from operation_counts import CallCounts, TorchCounts

from omni_core.prefix_cache.policy import ModelCachePolicy

BATCHES = (1, 8, 256)
"""Requests in a step."""
WARM_UP_STEPS = 6
"""Every staging slot has been used once."""
BLOCK_SIZE = 16
BLOCKS_PER_REQUEST = 8
MAX_NUM_TOKENS = 1024
HIDDEN_SIZE = 2048
CODES_WIDTH = 16
NUM_TOKEN_KEYS = 2
"""Hidden rows and `codes`."""
COMMITTER = "omni-core-committer"
PREFETCH = "omni-core-prefetch"
EMPTY_METER = Meter(TorchCounts(), CallCounts(), [])


class SavedStep(NamedTuple):
    """A step that nobody has consumed yet."""

    step_id: int
    starting: Meter
    saving: Meter


class StepMeters(NamedTuple):
    """What was counted in each call of one step."""

    starting: Meter
    saving: Meter
    taking: Meter
    looking: Meter
    """At the rows of one request, the first that is looked at."""
    acknowledging: Meter
    releasing: Meter


class StepCosts(NamedTuple):
    """The same as values, by the size of the load."""

    starting: dict[int, Cost]
    saving: dict[int, Cost]
    taking: dict[int, Cost]
    looking: dict[int, Cost]
    acknowledging: dict[int, Cost]
    releasing: dict[int, Cost]


class Load:
    """Steps that are all alike, so that any one of them says what a step costs. Subclasses have `step`."""

    counts = True
    """Whether steps are counted; not while the load warms up, to save time."""

    def __init__(self, make_rig, num_reqs, *, policy=None, runtime=None, **options):
        """A rig with hidden rows and `codes`, and room for `num_reqs` requests. `options`: of the rig."""
        blocks = max(num_reqs * BLOCKS_PER_REQUEST, 2 * MAX_NUM_TOKENS // BLOCK_SIZE)
        self.runtime = runtime or CountedRuntime()
        self.rig = make_rig(
            hidden=HIDDEN_SIZE,
            dtype=torch.bfloat16,
            keys={"codes": ((CODES_WIDTH,), torch.float32)},
            policy=policy or ModelCachePolicy(token_keys=frozenset({"codes"})),
            num_blocks=1 + blocks,
            block_size=BLOCK_SIZE,
            max_num_tokens=MAX_NUM_TOKENS,
            runtime=self.runtime,
            **options,
        )
        self._gathered = 0

    def warm_up(self, num_steps=WARM_UP_STEPS):
        """So many steps that are not counted."""
        self.counts = False
        for _ in range(num_steps):
            self.step()
        self.counts = True

    def step(self):
        """One step; what was counted in each of its calls."""
        raise NotImplementedError

    def metered(self):
        """Count what the calling thread does inside the block, if this step counts."""
        return self.runtime.metered() if self.counts else nullcontext(EMPTY_METER)

    def save(self, runs, further=None, *, finish=(), carry_owed=True):
        """Announce and save a step. `further`: outputs besides hidden rows and `codes`."""
        with self.metered() as starting:
            self.rig.begin(*runs, finish=finish)
        num_tokens = self.rig.num_tokens
        hidden = torch.ones(num_tokens, HIDDEN_SIZE, dtype=torch.bfloat16)
        brought = {"codes": torch.ones(num_tokens, CODES_WIDTH)} | (further or {})
        with self.metered() as saving:
            step_id = self.rig.cache.save_outputs(
                hidden,
                brought,
                num_tokens_unpadded=num_tokens,
                num_tokens_padded=num_tokens,
                carry_owed=carry_owed,
            )
        return SavedStep(step_id, starting, saving)

    def settle(self):
        """Until every write has landed and every read of the step under way is gathered.

        After that no call waits, so that none of them depends on who is first.
        """
        self.rig.cache.flush()
        reads = self.rig.cache.stats().live_reads
        if reads:
            self._gathered += reads * NUM_TOKEN_KEYS
            self.runtime.wait_passed("prefetch.gathered", self._gathered)
            self.runtime.wait_until_waiting(PREFETCH, on="prefetch-work")

    def take(self, saved, *, asked=(), counts=None):
        """Consume a step, look at the rows of one request, and give all back."""
        asked = tuple(asked) or tuple(item.req_id for item in self.rig.batch)
        with self.metered() as taking:
            taken = self.rig.cache.materialize(saved.step_id, asked, counts)
        assert len(taken) == len(asked)
        with self.metered() as looking:
            taken[asked[-1]]
        with self.metered() as acknowledging:
            taken.acknowledge()
        with self.metered() as releasing:
            taken.release()
        return StepMeters(saved.starting, saved.saving, taking, looking, acknowledging, releasing)

    def whole(self, runs, further=None, *, finish=(), counts=None):
        """A step that is saved, settled and taken."""
        saved = self.save(runs, further, finish=finish)
        self.settle()
        return self.take(saved, counts=counts)


def names(num_reqs):
    """Ids of so many requests."""
    return [f"r{i}" for i in range(num_reqs)]


def blocks_of(index, count=BLOCKS_PER_REQUEST):
    """The first `count` of the blocks that belong to request number `index`."""
    first = 1 + index * BLOCKS_PER_REQUEST
    return tuple(range(first, first + count))


def step_costs(load: Callable[[int], Load], sizes: Iterable[int]) -> StepCosts:
    """The costs of one step of `load(size)`, call by call, for every size."""
    steps = {size: load(size).step() for size in sizes}
    return StepCosts(
        *({size: step[call].cost for size, step in steps.items()} for call in range(len(StepCosts._fields)))
    )
