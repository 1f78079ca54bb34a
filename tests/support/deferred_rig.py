# SPDX-License-Identifier: Apache-2.0
"""A rig whose key `mel` is deferred; the device budget is checked after every call of the cache."""

from contextlib import contextmanager

import torch
from cache_rig import CacheRig
from row_values import assert_rows

from omni_core.prefix_cache.policy import ModelCachePolicy

MEL = "mel"
MEL_SPEC = ((4,), torch.float32)
MEL_ROW_BYTES = 16
CHUNK_ROWS = 4
CHUNK_BYTES = CHUNK_ROWS * MEL_ROW_BYTES
"""A record of `CHUNK_ROWS` rows: one step of the arenas' alignment, so that budgets can be counted in chunks."""


class DeferredRig(CacheRig):
    """`budget_bytes`: of the device ring. `deferred`: the deferred keys. Rows of `mel` are 16 bytes."""

    def __init__(self, *, budget_bytes=1 << 16, deferred=(MEL,), keys=None, needs_full_hidden_states=True, **options):
        policy = ModelCachePolicy(deferred_keys=frozenset(deferred), needs_full_hidden_states=needs_full_hidden_states)
        self.budget_bytes = budget_bytes
        super().__init__(
            policy=policy, keys={MEL: MEL_SPEC} | (keys or {}), device_staging_bytes=budget_bytes, **options
        )

    def on_device(self):
        """Records on the device, their bytes, and requests with an open deferred write."""
        stats = self.cache.stats()
        return stats.deferred_records, stats.deferred_bytes, stats.deferred_writes_open

    def copies(self):
        """Transfers of deferred rows so far."""
        return self.cache.stats().deferred_copies

    def check_budget(self):
        stats = self.cache.stats()
        assert 0 <= stats.deferred_bytes <= self.budget_bytes
        assert (stats.deferred_bytes == 0) is (stats.deferred_records == 0)

    def begin(self, *runs, **news):
        super().begin(*runs, **news)
        self.check_budget()

    def save(self, outputs=None, **saving):
        try:
            return super().save(outputs, **saving)
        finally:
            self.check_budget()

    def take(self, step_id, *req_ids, **options):
        try:
            return super().take(step_id, *req_ids, **options)
        finally:
            self.check_budget()

    def discard(self, step_id):
        self.cache.discard_step(step_id)
        self.check_budget()

    def settle(self):
        """Until the committer has nothing left to do; forces nothing."""
        assert self.runtime.comes_true(lambda: self.cache.stats().queued_writes == 0)


def assert_mel(rows, *pieces, key=MEL, trailing=(4,), dtype=torch.float32):
    """`rows` holds these pieces, `(who computed it, start, stop)`, under `mel`."""
    assert rows.zero_ranges.get(key, ()) == ()
    assert_rows(rows, *pieces, key=key, trailing=trailing, dtype=dtype)


def assert_both(rows, *pieces):
    """`rows` holds these pieces as hidden rows and under `mel`."""
    assert_rows(rows, *pieces)
    assert_mel(rows, *pieces)


@contextmanager
def deferred_rigs():
    """Makes rigs and closes them when the block ends; each must close without a rest."""
    made = []

    def make(**options):
        made.append(DeferredRig(**options))
        return made[-1]

    yield make
    for rig in made:
        rig.stop()
