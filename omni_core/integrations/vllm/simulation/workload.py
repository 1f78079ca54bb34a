# SPDX-License-Identifier: Apache-2.0
"""The random workloads of the simulator on vLLM's own scheduler: drawn by a seed, judged row by row."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from omni_core.integrations.vllm.simulation.driver import VllmSchedulerDriver
from omni_core.integrations.vllm.simulation.happenings import Happening
from omni_core.integrations.vllm.simulation.shape import KvGroups, VllmShape
from omni_core.runtime import Runtime
from omni_core.testing.fake_model import FakeModel
from omni_core.testing.sampling import SimDrafter
from omni_core.testing.scheduler_config import Mishaps, Preemption, SchedulerConfig
from omni_core.testing.sim_stage import CacheWrapper
from omni_core.testing.workloads import WorkloadConfig, WorkloadReport, run_workload


@dataclass(frozen=True, slots=True)
class VllmWorkload:
    """One workload: what the simulator knows of it, and what only vLLM does."""

    seed: int
    config: WorkloadConfig
    shape: VllmShape

    @classmethod
    def draw(cls, seed: int) -> VllmWorkload:
        """A workload that depends on `seed` alone."""
        rng = random.Random(f"vllm workload {seed}")
        config = WorkloadConfig.draw(seed)
        by_priority = rng.random() < 0.25
        if by_priority:
            config = replace(config, max_output_tokens=16)
        shape = _draw_shape(rng, config, by_priority=by_priority)
        scheduler = _draw_scheduler(rng, seed, config.stage.scheduler, shape, by_priority=by_priority)
        kernel = config.stage.kernel_block_size
        stage = replace(
            config.stage,
            scheduler=scheduler,
            kernel_block_size=None if kernel is None or scheduler.block_size % kernel else kernel,
        )
        likelihoods = replace(
            config.likelihoods,
            replaced=0.0,
            # A late token of the old request would be taken for the new one's: vLLM's ids are never used again.
            id_reused=0.0 if shape.async_scheduling else config.likelihoods.id_reused,
        )
        return cls(seed, replace(config, stage=stage, likelihoods=likelihoods), shape)

    def run(
        self, runtime: Runtime | None = None, wrap_cache: CacheWrapper | None = None
    ) -> tuple[WorkloadReport, Mapping[Happening, int]]:
        """Run it and judge every delivery. Blocks for a fraction of a second.

        Args:
            runtime: default: real threads.
            wrap_cache: put around the cache, to watch it or to break it.

        Returns:
            What was delivered, and what the scheduler did.

        Raises:
            OracleViolationError: a delivery was wrong. A note on it names the seed and the settings.
            OmniPrefixCacheError: the cache raised where a right one does not.
            SchedulerMismatchError: vLLM did what the adapter holds for impossible.
        """
        drivers: list[VllmSchedulerDriver] = []

        def make_driver(scheduler: SchedulerConfig) -> VllmSchedulerDriver:
            model = FakeModel(self.config.hidden, self.config.keys)
            drafter = SimDrafter(model, scheduler.max_draft_tokens, self.config.stage.drafts_accepted, self.seed)
            drivers.append(VllmSchedulerDriver(scheduler, self.shape, drafter))
            return drivers[-1]

        try:
            report = run_workload(
                self.seed, self.config, runtime=runtime, make_scheduler=make_driver, wrap_cache=wrap_cache
            )
        except Exception as error:
            error.add_note(f"on vLLM's scheduler: VllmWorkload.draw({self.seed}), {self.shape}")
            raise
        return report, Counter(drivers[0].witness.counts)


def _draw_shape(rng: random.Random, config: WorkloadConfig, *, by_priority: bool) -> VllmShape:
    groups = KvGroups.FULL if by_priority else rng.choice((KvGroups.FULL, KvGroups.FULL, *KvGroups))
    mamba = groups is KvGroups.MAMBA_THEN_FULL
    return VllmShape(
        max_model_len=config.max_prompt_tokens + config.max_output_tokens,
        kv_groups=groups,
        match_unit=rng.choice((1, 2)) if mamba else None,
        async_scheduling=rng.random() < 0.3,
        reserve_full_prompt=rng.random() < 0.3,
        lookahead_tokens=0 if mamba else rng.choice((0, 0, 0, 3)),
    )


def _draw_scheduler(
    rng: random.Random, seed: int, drawn: SchedulerConfig, shape: VllmShape, *, by_priority: bool
) -> SchedulerConfig:
    mamba = shape.kv_groups is KvGroups.MAMBA_THEN_FULL
    sliding = shape.kv_groups in (KvGroups.FULL_THEN_SLIDING, KvGroups.SLIDING_THEN_FULL)
    # By priority, a request is preempted after it was scheduled only where several tables grow in one schedule.
    sizes = (4, 8, 16) if mamba else (1, 2, 4) if by_priority else (1, 2, 4, 4, 8, 16)
    block_size = rng.choice(sizes)
    drafts = 0 if mamba else rng.choice((0, 0, 1, 3, 5))
    chunk = drawn.max_chunk_tokens
    scheduler = replace(
        drawn,
        block_size=block_size,
        max_num_requests=8 if by_priority else drawn.max_num_requests,
        max_draft_tokens=drafts,
        max_chunk_tokens=None if chunk is None else max(chunk, 1 + drafts),
        partial_block_hits=mamba,
        side_group_window=rng.choice((block_size, 3 * block_size)) if sliding else None,
        preemption=rng.choice((Preemption.RECOMPUTE_V1, Preemption.RECOMPUTE_V1, Preemption.RECOMPUTE_V2)),
        block_digests=by_priority or rng.random() < 0.3,
        mishaps=Mishaps(
            seed,
            preempted=0.0 if shape.async_scheduling and drafts else rng.choice((0.0, 0.0, 0.1)),
            taken_back=0.1 if by_priority else 0.0,
            piece_delay=3,
        ),
    )
    needed = shape.blocks_for(scheduler, shape.max_model_len)
    return replace(scheduler, num_blocks=1 + needed * rng.choice((1, 1, 2) if by_priority else (1, 1, 2, 4)))
