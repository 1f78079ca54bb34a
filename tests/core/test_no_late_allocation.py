# SPDX-License-Identifier: Apache-2.0
"""Pinned and device memory is allocated when the cache is built, and never again."""

from dataclasses import replace

from omni_core.backend.observer import DeviceObserver
from omni_core.testing.row_kinds import RowKind
from omni_core.testing.workloads import WorkloadConfig, run_workload

STAGING_DEPTH = 3
BOUNCES = 2
RINGS = 2  # step snapshots, deferred rows


class Allocations(DeviceObserver):
    """Every pinned arena and device ring asked for, and every copy."""

    def __init__(self):
        self.arenas = []
        self.rings = []
        self.copies = 0

    def arena_wanted(self, nbytes):
        self.arenas.append((nbytes, self.copies))

    def ring_wanted(self, nbytes):
        self.rings.append((nbytes, self.copies))

    def copy_queued(self, copy):
        self.copies += 1


def long_workload(observer, seed):
    """Hits, deferred keys under pressure, chunked prefill, drafts, preemption, aborts at every point."""
    drawn = WorkloadConfig.draw(seed)
    stage = replace(
        drawn.stage,
        scheduler=replace(drawn.stage.scheduler, max_chunk_tokens=5, max_draft_tokens=1),
        staging_depth=STAGING_DEPTH,
        declare_keys=True,
        deferred_keys=frozenset({drawn.keys[0].name}),
        device_staging_bytes=8 << 10,
        backend_options={"observer": observer},
    )
    likelihoods = replace(drawn.likelihoods, abort_between=0.02, abort_before_forward=0.01)
    return replace(drawn, stage=stage, likelihoods=likelihoods, num_requests=250, max_output_tokens=16)


def test_a_thousand_steps_allocate_no_pinned_and_no_device_memory():
    observer = Allocations()
    seed = next(seed for seed in range(100) if WorkloadConfig.draw(seed).keys)
    report = run_workload(seed, long_workload(observer, seed))
    assert report.num_steps >= 1000
    assert min(report.rows[kind] for kind in (RowKind.STORED_HIT, RowKind.DEFERRED, RowKind.PARTIAL_CHUNK)) > 1000
    assert report.requests_aborted > 0
    assert observer.copies > 1000
    assert [copies for _, copies in observer.arenas] == [0] * (STAGING_DEPTH + BOUNCES)
    assert [copies for _, copies in observer.rings] == [0] * RINGS
