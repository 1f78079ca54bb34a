# SPDX-License-Identifier: Apache-2.0
"""Loads of a model whose `codes` are deferred."""

from __future__ import annotations

from budget_loads import CODES_WIDTH, WARM_UP_STEPS, Load, blocks_of, names
from budget_plain_loads import Decoding
from cache_rig import more, new

from omni_core.backend.memory import aligned_nbytes
from omni_core.prefix_cache.policy import ModelCachePolicy

DEFERRED_CODES = ModelCachePolicy(deferred_keys=frozenset({"codes"}))
CODES_ROW_BYTES = 4 * CODES_WIDTH
BUDGET_STEPS = 4
"""Steps whose rows fit on the device, of a load under pressure."""


class DeferringWithRoom(Decoding):
    """A decoding batch whose steps are taken one by one, so that the device always has room."""

    def __init__(self, make_rig, num_reqs):
        super().__init__(make_rig, num_reqs, policy=DEFERRED_CODES)


class Waiting(Load):
    """Steps of a batch that are given up, so that their deferred rows stay on the device."""

    def __init__(self, make_rig, num_reqs, **options):
        super().__init__(make_rig, num_reqs, policy=DEFERRED_CODES, **options)
        self.names = names(num_reqs)
        self.keep_waiting([new(name, blocks_of(i), run=1) for i, name in enumerate(self.names)])

    def keep_waiting(self, runs, *, finish=()):
        """One step; returns it once the committer has nothing to do. Its rows are not forced off the device."""
        saved = self.save(runs, finish=finish, carry_owed=False)
        self.rig.cache.discard_step(saved.step_id)
        assert self.runtime.comes_true(lambda: self.rig.cache.stats().queued_writes == 0)
        return saved


class DeferringUnderPressure(Waiting):
    """Each step has to make room on the device for the next."""

    def __init__(self, make_rig, num_reqs):
        nbytes = BUDGET_STEPS * aligned_nbytes(num_reqs * CODES_ROW_BYTES)
        super().__init__(make_rig, num_reqs, device_staging_bytes=nbytes)
        self.warm_up(2 * WARM_UP_STEPS)

    def step(self):
        copies = self.rig.cache.stats().deferred_copies
        saved = self.keep_waiting([more(name) for name in self.names])
        self.forced = self.rig.cache.stats().deferred_copies - copies
        return saved


class FinishingDeferred(Waiting):
    """One of a batch ends while rows of `num_waiting` steps wait on the device."""

    def __init__(self, make_rig, num_reqs, num_waiting=1):
        super().__init__(make_rig, num_reqs + 1)
        for _ in range(WARM_UP_STEPS):
            self.keep_waiting([more(name) for name in self.names])
        self.rig.cache.flush()
        for _ in range(num_waiting):
            self.keep_waiting([more(name) for name in self.names])
        assert self.rig.cache.stats().deferred_records == num_waiting

    def step(self):
        *stay, leaving = self.names
        return self.keep_waiting([more(name) for name in stay], finish=[leaving])
